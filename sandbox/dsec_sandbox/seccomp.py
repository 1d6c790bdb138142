"""The system calls that a sandbox is refused, as the `linux.seccomp` part of an OCI configuration.

A deny list: everything else is allowed, so that programs run as they do elsewhere. What is on it, and why:

* Making device nodes. A sandbox has CAP_MKNOD as with docker, and docker relies on the device cgroup to make such nodes
  useless. Here no such cgroup is assumed: a node for the host's disk must not come to be in the first place. 0:0 nodes
  are overlay whiteouts, which only the builder of layers makes.
* The ioctls that swap the extents of two files. They check permissions of the two descriptors only: measured on ext4,
  MOVE_EXT changes a file that is shared read-only.
* Interfaces with a large or young attack surface: bpf, io_uring, userfaultfd, the kernel's keyrings and its log, which
  have no namespace, and the mount interface, which user namespaces open to everybody.

Source: the OCI runtime specification, "Seccomp"; seccomp_rule_add(3).
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Sequence
from typing import Any, Final

_ARCHITECTURES: Final = {
    # An architecture that is not named is killed at its first call: name those that the kernel runs beside its own.
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}

_SWAPPING_IOCTLS: Final = {
    "XFS_IOC_SWAPEXT": 0xC0C0586D,
    "XFS_IOC_EXCHANGE_RANGE": 0x40285881,
    "EXT4_IOC_MOVE_EXT": 0xC028660F,
    "EXT4_IOC_SWAP_BOOT": 0x6611,
}

_DEVICES: Final = (stat.S_IFCHR, stat.S_IFBLK)
_FORMAT_BITS: Final = 0o170000

_MOUNTING: Final = (
    "mount",
    "umount",
    "umount2",
    "pivot_root",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "move_mount",
    "open_tree",
    "open_tree_attr",
    "mount_setattr",
)
_EXPOSED: Final = ("bpf", "userfaultfd", "keyctl", "add_key", "request_key", "syslog")
_IO_URING: Final = ("io_uring_setup", "io_uring_enter", "io_uring_register")

_LOW_32_BITS: Final = 0xFFFF_FFFF
"""The kernel looks at these bits of an ioctl's number only, so the filter must too."""


def profile(machine: str) -> dict[str, Any] | None:
    """The filter for `machine` (as of uname(2)); None where we know none."""
    architectures = _ARCHITECTURES.get(machine)
    if architectures is None:
        return None
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": architectures,
        "syscalls": [
            *(_device_rule(name, index, kind) for name, index in (("mknod", 1), ("mknodat", 2)) for kind in _DEVICES),
            *(_deny(("ioctl",), errno.EPERM, [_masked(1, _LOW_32_BITS, code)]) for code in _SWAPPING_IOCTLS.values()),
            _deny((*_MOUNTING, *_EXPOSED), errno.EPERM),
            _deny(_IO_URING, errno.ENOSYS),  # programs take it as an old kernel and fall back
        ],
    }


def _device_rule(name: str, index: int, kind: int) -> dict[str, Any]:
    return _deny((name,), errno.EPERM, [_masked(index, _FORMAT_BITS, kind)])


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    """Argument `index`, of whose bits only `mask` count, is `value`."""
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _deny(names: Sequence[str], code: int, arguments: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": code, "args": list(arguments)}
