"""Names of Docker images: what is one name, and what is none."""

from __future__ import annotations

import pytest

from dsec_registry.reference import normalized
from dsec_store.errors import Invalid


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("busybox", "docker.io/library/busybox:latest"),
        ("busybox:latest", "docker.io/library/busybox:latest"),
        ("library/busybox", "docker.io/library/busybox:latest"),
        ("docker.io/busybox", "docker.io/library/busybox:latest"),
        ("docker.io/library/busybox:latest", "docker.io/library/busybox:latest"),
        ("index.docker.io/busybox", "docker.io/library/busybox:latest"),
        ("busybox:1.36.1-MUSL", "docker.io/library/busybox:1.36.1-MUSL"),
        ("user/app:v1", "docker.io/user/app:v1"),
        ("a/b/c", "docker.io/a/b/c:latest"),
        ("localhost/app", "localhost/app:latest"),
        ("localhost:5000/app", "localhost:5000/app:latest"),
        ("registry:5000/app:v1", "registry:5000/app:v1"),
        ("ghcr.io/a/b__c:v1", "ghcr.io/a/b__c:v1"),
        ("Upper/app", "Upper/app:latest"),
        ("[::1]:5000/app", "[::1]:5000/app:latest"),
        ("localhost", "docker.io/library/localhost:latest"),
    ],
)
def test_what_is_left_out_is_added(text: str, name: str) -> None:
    assert normalized(text) == name
    assert normalized(name) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":v1",
        "a:",
        "/a",
        "a/",
        "a//b",
        "Busybox",
        "host.io/Upper",
        "a b",
        "a:v 1",
        "a:-v",
        "a:" + "v" * 129,
        "../a",
        "-host.io/a",
        "<none>:<none>",
        "a\n",
        "é",
        "a:é",
        "x/" * 127 + "yy",
        "a@sha256:" + "0" * 64,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="not a name of an image"):
        normalized(text)
