"""The OCI runtime configuration of one run: from values to the document that becomes a bundle's config.json.

Pure: nothing is looked up here. The sandbox is docker's default container as its users know it (capabilities, mounts,
masked paths, sysctls), with these differences: no network but loopback, which the runtime brings up by itself; no
cgroup file system; the paths of /proc that tell about physical memory or reach the whole machine are masked; system
calls are filtered by `dsec_sandbox.seccomp`; and /etc/hostname, /etc/hosts and /etc/resolv.conf stay as the image has
them.

A device node that came in an image must not open the host's device, and no device cgroup is assumed: the root is made
`nodev`. The document cannot say that, and crun 1.8 drops the attribute of the mount that it is given, so a hook sets it
in the container's own mount namespace. The standard streams are those of the process that calls the runtime.

Source: the OCI runtime specification 1.0; moby's `oci/defaults.go`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from dsec_sandbox import seccomp
from dsec_sandbox.spec import RunConfig
from dsec_sandbox.users import Identity

Document = dict[str, Any]

CAPABILITIES: Final = (
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
)
"""Docker's fourteen."""

NAMESPACES: Final = ("pid", "mount", "ipc", "uts", "network", "cgroup")

MASKED_PATHS: Final = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/sysrq-trigger",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
READONLY_PATHS: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys")

SYSCTLS: Final = {
    # Both are the network namespace's own: a server of a plain user may take port 80, and anybody may ping.
    "net.ipv4.ip_unprivileged_port_start": "0",
    "net.ipv4.ping_group_range": "0 2147483647",
}


def _mount(kind: str, target: str, source: str, *options: str) -> Document:
    return {"destination": target, "type": kind, "source": source, "options": ["nosuid", *options]}


HOOK_SHELL: Final = "/bin/sh"
"""Of the host: a hook's program is looked up there."""

MOUNTS: Final = (
    _mount("proc", "/proc", "proc", "noexec", "nodev"),
    _mount("tmpfs", "/dev", "tmpfs", "strictatime", "mode=755", "size=65536k"),
    _mount("devpts", "/dev/pts", "devpts", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
    _mount("tmpfs", "/dev/shm", "shm", "noexec", "nodev", "mode=1777", "size=65536k"),
    _mount("mqueue", "/dev/mqueue", "mqueue", "noexec", "nodev"),
    _mount("sysfs", "/sys", "sysfs", "noexec", "nodev", "ro"),
)

PLACES: Final = ("/dev", "/proc", "/sys")
"""Directories that the root must have for MOUNTS; the others lie in these."""


def document(root: Path, config: RunConfig, identity: Identity, machine: str) -> Document:
    """The configuration that runs `config` as `identity` on the file system at `root`.

    `config` is final: its `env`, `workdir` and `hostname` are used as they are. `machine` is the kernel's (uname(2)).
    """
    linux: Document = {
        "namespaces": [{"type": name} for name in NAMESPACES],
        "maskedPaths": list(MASKED_PATHS),
        "readonlyPaths": list(READONLY_PATHS),
        "sysctl": dict(SYSCTLS),
    }
    if (profile := seccomp.profile(machine)) is not None:
        linux["seccomp"] = profile
    return {
        "ociVersion": "1.0.0",
        "process": _process(config, identity),
        "root": {"path": str(root.absolute()), "readonly": False},
        "hostname": config.hostname,
        "mounts": list(MOUNTS),
        "hooks": {"createContainer": [_without_devices(root)]},
        "linux": linux,
    }


def _without_devices(root: Path) -> Document:
    """The hook that makes the container's root `nodev`, in its mount namespace, before it becomes the root.

    It reads what the runtime writes to its standard input: the runtime fails when nobody does.
    """
    script = 'read -r state; exec mount -o remount,bind,nodev "$0"'
    return {"path": HOOK_SHELL, "args": ["sh", "-c", script, str(root.absolute())]}


def _process(config: RunConfig, identity: Identity) -> Document:
    return {
        "terminal": config.terminal,
        "user": {"uid": identity.uid, "gid": identity.gid, "additionalGids": list(identity.additional_gids)},
        "args": list(config.args),
        "env": [f"{name}={value}" for name, value in config.env],
        "cwd": config.workdir,
        "capabilities": _capabilities(identity.uid),
        "noNewPrivileges": False,
    }


def _capabilities(uid: int) -> Document:
    """A user other than root has none, as after execve(2), but may gain the bounding set through a setuid program."""
    held = list(CAPABILITIES) if uid == 0 else []
    return {
        "bounding": list(CAPABILITIES),
        "effective": held,
        "permitted": held,
        "inheritable": [],
        "ambient": [],
    }
