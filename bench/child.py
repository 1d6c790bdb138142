"""Runs a command as its only child, and prints as JSON what that took: seconds, CPU seconds, peak resident bytes.

A process of its own, and a small one: a child's peak begins with that of the process that forked it, and this one has
imported next to nothing (`python -I -S`). Fails as the command does.
"""

import json
import os
import sys
import time


def main() -> None:
    command = sys.argv[1:]
    started = time.perf_counter()
    silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=silent)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - started
    if status:
        sys.exit(os.waitstatus_to_exitcode(status))
    print(json.dumps({"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss << 10}))


if __name__ == "__main__":
    main()
