"""The image's User against its passwd and group files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_sandbox.users import Identity, resolve
from dsec_store.errors import Invalid

PASSWD = b"""\
root:x:0:0:root:/root:/bin/sh
broken line
worker:x:1000:1001:A worker:/home/worker:/bin/sh
toobig:x:99999999999:1::/:/bin/sh
nohome:x:1002:1002:::/bin/sh
worker:x:5:5::/second:/bin/sh
+::::::
"""
GROUP = b"""\
root:x:0:worker
worker:x:1001:
broken:x:none:worker
build:x:2000:other,worker
alone:x:2001:\r
"""


@pytest.mark.parametrize(
    ("user", "identity"),
    [
        ("", Identity(0, 0, (0,), "/root")),
        ("root", Identity(0, 0, (0,), "/root")),
        ("worker", Identity(1000, 1001, (1001, 0, 2000), "/home/worker")),
        ("1000", Identity(1000, 1001, (1001, 0, 2000), "/home/worker")),
        ("worker:", Identity(1000, 1001, (1001, 0, 2000), "/home/worker")),
        ("worker:alone", Identity(1000, 2001, (2001,), "/home/worker")),
        ("worker:2001", Identity(1000, 2001, (2001,), "/home/worker")),
        ("1000:77", Identity(1000, 77, (77,), "/home/worker")),
        (":alone", Identity(0, 2001, (2001,), "/root")),
        ("4242", Identity(4242, 0, (0,), "/")),
        ("4242:4343", Identity(4242, 4343, (4343,), "/")),
        ("nohome", Identity(1002, 1002, (1002,), "/")),
    ],
)
def test_users_are_resolved_as_docker_does(user: str, identity: Identity) -> None:
    assert resolve(user, PASSWD, GROUP) == identity


def test_an_image_without_the_files_has_numbers() -> None:
    assert resolve("", b"", b"") == Identity(0, 0, (0,), "/")
    assert resolve("7:8", b"", b"") == Identity(7, 8, (8,), "/")


@pytest.mark.parametrize("user", ["nobody", "-1", "+5", "2147483648", "toobig", "٣"])
def test_an_unknown_user_is_named(user: str) -> None:
    with pytest.raises(Invalid, match="has no user '" + user.replace("+", r"\+")):
        resolve(user, PASSWD, GROUP)


@pytest.mark.parametrize("group", ["nogroup", "broken", "-1"])
def test_an_unknown_group_is_named(group: str) -> None:
    with pytest.raises(Invalid, match=f"has no group '{group}'"):
        resolve(f"worker:{group}", PASSWD, GROUP)


@given(st.binary(), st.binary())
def test_files_of_any_content_still_let_numbers_run(passwd: bytes, group: bytes) -> None:
    identity = resolve("12:34", passwd, group)
    assert (identity.uid, identity.gid) == (12, 34)
    assert identity.home.startswith("/")
