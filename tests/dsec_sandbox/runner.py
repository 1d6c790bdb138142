"""A caller of `run` as a process of its own: the request is JSON in argv, the outcome goes to its status file."""

import json
import sys
from pathlib import Path

from dsec_sandbox.outcome import write_status_file
from dsec_sandbox.run import run
from dsec_sandbox.spec import RunConfig


def main(request: str) -> int:
    fields = json.loads(request)
    config = RunConfig(
        **{
            **fields["config"],
            "args": tuple(fields["config"]["args"]),
            "env": tuple(map(tuple, fields["config"]["env"])),
        }
    )
    outcome = run(Path(fields["root"]), config, state=Path(fields["state"]), container_id=fields["id"])
    write_status_file(Path(fields["status"]), outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
