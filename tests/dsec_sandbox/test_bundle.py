"""The OCI configuration of a run, as a value."""

import json
from pathlib import Path

from dsec_sandbox import bundle, seccomp
from dsec_sandbox.spec import RunConfig
from dsec_sandbox.users import Identity

CONFIG = RunConfig(env=(("A", "1"), ("B", "x=y")), args=("sh", "-c", "true"), workdir="/w", hostname="h")


def test_a_document_holds_what_was_asked() -> None:
    document = bundle.document(Path("/mnt/root"), CONFIG, Identity(0, 0, (0, 5), "/root"), "x86_64")
    assert json.loads(json.dumps(document)) == document
    assert document["root"] == {"path": "/mnt/root", "readonly": False}
    assert document["hostname"] == "h"
    process = document["process"]
    assert process["args"] == ["sh", "-c", "true"]
    assert process["env"] == ["A=1", "B=x=y"]
    assert process["cwd"] == "/w"
    assert process["user"] == {"uid": 0, "gid": 0, "additionalGids": [0, 5]}
    assert not process["terminal"]
    assert "rlimits" not in process


def test_root_holds_dockers_capabilities_and_others_none() -> None:
    root = bundle.document(Path("/r"), CONFIG, Identity(0, 0, (0,), "/"), "x86_64")["process"]["capabilities"]
    assert len(root["bounding"]) == 14
    assert root["effective"] == root["permitted"] == root["bounding"]
    plain = bundle.document(Path("/r"), CONFIG, Identity(5, 0, (0,), "/"), "x86_64")["process"]["capabilities"]
    assert plain["bounding"] == root["bounding"]
    assert plain["effective"] == plain["permitted"] == plain["inheritable"] == plain["ambient"] == []


def test_documents_share_nothing_that_can_be_changed() -> None:
    identity = Identity(0, 0, (0,), "/")
    first = bundle.document(Path("/r"), CONFIG, identity, "x86_64")
    first["linux"]["maskedPaths"].clear()
    first["process"]["capabilities"]["bounding"].clear()
    assert bundle.document(Path("/r"), CONFIG, identity, "x86_64")["linux"]["maskedPaths"]
    assert first["process"]["capabilities"]["effective"]


def test_the_filter_has_the_kernels_log_and_every_call_that_mounts() -> None:
    document = bundle.document(Path("/r"), CONFIG, Identity(0, 0, (0,), "/"), "x86_64")
    denied = {name for rule in document["linux"]["seccomp"]["syscalls"] if not rule["args"] for name in rule["names"]}
    assert {"mount", "move_mount", "open_tree", "open_tree_attr", "syslog"} <= denied


def test_an_architecture_without_a_profile_has_no_filter() -> None:
    assert seccomp.profile("s390x") is None
    assert "seccomp" not in bundle.document(Path("/r"), CONFIG, Identity(0, 0, (0,), "/"), "s390x")["linux"]
