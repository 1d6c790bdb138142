"""Real runs in real containers: what the command sees, what the caller gets, and that nothing is left."""

import json
import os
import shutil
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec_sandbox.outcome import Outcome, exited
from dsec_sandbox.run import run
from dsec_sandbox.spec import RunConfig
from dsec_store.descriptor import DEFAULT_PATH
from dsec_store.errors import Invalid
from tests.dsec_sandbox.box import Box

pytestmark = pytest.mark.component


def signals(line: str) -> tuple[str, int]:
    """Name and mask of a line of /proc/<pid>/status, without signals 32 and 33: they are the C library's own, and no
    program can set them, but may have inherited them."""
    name, mask = line.split()
    return name, int(mask, 16) & 0x7FFF_FFFF


class TestEnd:
    @pytest.mark.parametrize("code", [0, 7, 125, 126, 127, 255])
    def test_the_commands_own_exit_code(self, box: Box, code: int) -> None:
        result = box.run("sh", "-c", f"exit {code}")
        assert (result.outcome, result.returncode, result.stderr) == (exited(code), code, b"")

    def test_a_command_that_is_killed(self, box: Box) -> None:
        caller = box.start("sh", "-c", "echo ready; exec sleep 1000")
        assert caller.read_line() == "ready"
        os.kill(caller.init_pid(), signal.SIGKILL)
        result = caller.finish()
        assert result.outcome == Outcome("signaled", 137, 9, "killed by SIGKILL")
        assert result.returncode == 137

    def test_a_child_that_is_killed_is_the_commands_affair(self, box: Box) -> None:
        assert box.run("sh", "-c", "sh -c 'kill -9 $$'; exit $?").outcome == exited(137)

    def test_what_the_command_leaves_running_ends_with_it(self, box: Box) -> None:
        assert box.run("sh", "-c", "sleep 1000 >/dev/null 2>&1 & exit 3").outcome == exited(3)

    def test_a_command_that_does_not_exist(self, box: Box) -> None:
        result = box.run("nope")
        assert result.outcome == Outcome("not-found", 127, None, "nope: not found in PATH")
        assert (result.returncode, result.stdout, result.stderr) == (127, b"", b"")

    def test_a_command_without_execute_bits(self, box: Box) -> None:
        result = box.run("/etc/passwd")
        assert result.outcome is not None
        assert (result.outcome.kind, result.returncode) == ("not-executable", 126)

    @pytest.mark.parametrize(
        ("content", "mode", "end", "text"),
        [
            (b"#!/opt/gone\n", 0o755, ("not-found", 127), "interpreter /opt/gone"),
            (b"neither script nor program", 0o755, ("not-executable", 126), "wrong format"),
            (b"#!/bin/sh\n", 0o700, ("not-executable", 126), "not allowed for this user"),
        ],
    )
    def test_a_command_that_the_kernel_refuses(
        self, box: Box, content: bytes, mode: int, end: tuple[str, int], text: str
    ) -> None:
        (box.root / "bin/program").write_bytes(content)
        (box.root / "bin/program").chmod(mode)
        result = box.run("program", user="worker")
        assert result.outcome is not None
        assert (result.outcome.kind, result.returncode) == end
        assert text in result.outcome.text

    def test_a_program_without_its_loader(self, box: Box) -> None:
        shutil.copy("/bin/cat", box.root / "bin/dynamic")
        result = box.run("dynamic")
        assert result.outcome is not None
        assert result.outcome.kind == "not-found"
        assert "its interpreter" in result.outcome.text


class TestStreams:
    def test_bytes_pass_exactly(self, box: Box) -> None:
        sent = os.urandom(1 << 20)
        result = box.run("cat", stdin=sent)
        assert result.stdout == sent

    def test_output_and_errors_stay_apart(self, box: Box) -> None:
        result = box.run("sh", "-c", "echo out; echo err >&2")
        assert (result.stdout, result.stderr) == (b"out\n", b"err\n")

    def test_a_closed_input_is_empty(self, box: Box) -> None:
        result = box.run("sh", "-c", "cat; readlink /proc/self/fd/0", before=("sh", "-c", 'exec "$@" <&-', "sh"))
        assert (result.stdout, result.outcome) == (b"/dev/null\n", exited(0))

    def test_all_closed_is_fine(self, box: Box) -> None:
        caller = box.start("sh", "-c", "exit 4", before=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"))
        assert caller.finish().outcome == exited(4)

    def test_files_keep_their_owners(self, box: Box, tmp_path: Path) -> None:
        """crun gives the standard streams to the user of the container."""
        for name in ("in", "out", "err"):
            (tmp_path / name).write_text("data\n")
            os.chown(tmp_path / name, 4711, 4712)
        with open(tmp_path / "in") as source, open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
            popen = {"stdin": source, "stdout": out, "stderr": err}
            result = box.start("cat", user="worker", popen=popen).finish()
        assert result.outcome == exited(0)
        assert (tmp_path / "out").read_text() == "data\n"
        for name in ("in", "out", "err"):
            assert (tmp_path / name).stat().st_uid == 4711

    def test_a_plain_user_can_reopen_the_pipes(self, box: Box) -> None:
        result = box.run("sh", "-c", "echo out >/dev/stdout; echo err >/dev/stderr", user="worker")
        assert (result.stdout, result.stderr) == (b"out\n", b"err\n")

    def test_no_descriptor_but_the_three(self, box: Box) -> None:
        """Not even one that is left open for children, with the variable that tells crun to pass it on."""
        read, write = os.pipe()
        popen = {"pass_fds": (read, write), "env": {"LISTEN_FDS": "9", "NOTIFY_SOCKET": "/run/nothing"}}
        result = box.run("sh", "-c", "ls /proc/$$/fd; env | grep -c -e LISTEN -e NOTIFY", popen=popen)
        os.close(read)
        os.close(write)
        assert result.lines == ["0", "1", "2", "0"]


class TestSurroundings:
    def test_environment_directory_and_names(self, box: Box) -> None:
        script = "env; pwd; hostname; echo $$"
        env = [["GREETING", "grüß \"gott\" = 'x'\n"], ["PATH", "/bin"]]
        result = box.run("/bin/sh", "-c", script, env=env, workdir="/made/here", hostname="box")
        assert "GREETING=grüß \"gott\" = 'x'" in result.lines
        assert "PATH=/bin" in result.lines
        assert "HOME=/root" in result.lines
        assert result.lines[-3:] == ["/made/here", "box", "1"]

    def test_only_what_was_given_is_in_the_environment(self, box: Box) -> None:
        result = box.run("/bin/env", env=[["A", "1"]])
        assert sorted(result.lines) == ["A=1", "HOME=/root", f"PATH={DEFAULT_PATH}"]

    def test_a_host_name_is_made_from_the_id(self, box: Box) -> None:
        assert box.run("hostname").lines == ["box-1"]

    @pytest.mark.parametrize(
        ("user", "lines"),
        [
            ("", ["uid=0(root) gid=0(root) groups=0(root)", "/root"]),
            ("worker", ["uid=1000(worker) gid=1001(worker) groups=1001(worker),2000(build)", "/home/worker"]),
            ("1000:alone", ["uid=1000(worker) gid=2001(alone) groups=2001(alone)", "/home/worker"]),
            ("4242:4343", ["uid=4242 gid=4343 groups=4343", "/"]),
        ],
    )
    def test_users_groups_and_homes(self, box: Box, user: str, lines: list[str]) -> None:
        assert box.run("sh", "-c", "id; echo $HOME", user=user).lines == lines

    def test_an_unknown_user_is_refused_by_name(self, box: Box) -> None:
        result = box.run("true", user="stranger")
        assert b"the image has no user 'stranger'" in result.stderr
        assert result.outcome is None

    def test_a_missing_working_directory_is_made(self, box: Box) -> None:
        assert box.run("pwd", workdir="/a/b", user="worker").lines == ["/a/b"]
        made = (box.root / "a/b").stat()
        assert (made.st_uid, stat.S_IMODE(made.st_mode)) == (0, 0o755)

    def test_a_working_directory_behind_a_link_stays_inside(self, box: Box, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (box.root / "srv").symlink_to(outside)
        refused = box.run("pwd", workdir="/srv/new")
        assert b"working directory /srv/new" in refused.stderr
        (box.root / str(outside).lstrip("/")).mkdir(parents=True)
        assert box.run("pwd", workdir="/srv/new").lines == [f"{outside}/new"]
        assert list(outside.iterdir()) == []

    def test_a_working_directory_that_is_a_file_is_refused(self, box: Box) -> None:
        assert b"/etc/passwd: Not a directory" in box.run("pwd", workdir="/etc/passwd").stderr

    def test_files_of_the_image_stay_as_they_are(self, box: Box) -> None:
        for name in ("hosts", "hostname", "resolv.conf"):
            (box.root / "etc" / name).write_text(f"own {name}\n")
        result = box.run("sh", "-c", "cd /etc; cat hosts hostname resolv.conf; echo changed >hosts")
        assert result.lines == ["own hosts", "own hostname", "own resolv.conf"]
        assert (box.root / "etc/hosts").read_text() == "changed\n"

    def test_signals_and_umask_are_the_usual_ones(self, box: Box) -> None:
        result = box.run("sh", "-c", "grep -E 'Sig(Blk|Ign)' /proc/self/status; umask")
        assert [signals(line) for line in result.lines[:2]] == [("SigBlk:", 0), ("SigIgn:", 0)]
        assert result.lines[2:] == ["0022"]


class TestIsolation:
    def test_capabilities(self, box: Box) -> None:
        script = ("grep", "^Cap", "/proc/self/status")
        docker, none = "00000000a80425fb", "0000000000000000"
        held = dict(line.split(":\t") for line in box.run(*script).lines)
        assert held == {"CapInh": none, "CapPrm": docker, "CapEff": docker, "CapBnd": docker, "CapAmb": none}
        held = dict(line.split(":\t") for line in box.run(*script, user="worker").lines)
        assert held == {"CapInh": none, "CapPrm": none, "CapEff": none, "CapBnd": docker, "CapAmb": none}

    def test_loopback_is_up_and_alone(self, box: Box) -> None:
        result = box.run(
            "sh", "-c", "ls /sys/class/net; cat /sys/class/net/lo/flags; ping -c 1 127.0.0.1 >/dev/null; echo $?"
        )
        assert result.lines == ["lo", "0x9", "0"]

    def test_a_plain_user_may_listen_on_low_ports(self, box: Box) -> None:
        script = "nc -l -p 80 -e echo hello & while ! nc 127.0.0.1 80 </dev/null 2>/dev/null; do :; done"
        assert box.run("sh", "-c", script, user="worker").lines == ["hello"]

    def test_namespaces_are_its_own(self, box: Box) -> None:
        names = ("pid", "mnt", "ipc", "uts", "net", "cgroup")
        result = box.run("sh", "-c", "; ".join(f"readlink /proc/self/ns/{name}" for name in names))
        assert len(result.lines) == len(names)
        assert not set(result.lines) & {os.readlink(f"/proc/self/ns/{name}") for name in names}

    def test_processes_of_the_host_are_not_seen(self, box: Box) -> None:
        result = box.run("sh", "-c", "ls -d /proc/[0-9]* | wc -l; cut -d: -f3 /proc/self/cgroup | sort -u")
        assert int(result.lines[0]) <= 4
        assert result.lines[1:] == ["/"]

    def test_device_nodes_cannot_be_made(self, box: Box) -> None:
        nodes = "for kind in b c; do mknod /dev/x $kind 1 1 && echo made; done; mknod /tmp/whiteout c 0 0"
        result = box.run("sh", "-c", f"{nodes}; mknod /tmp/p p && echo pipe")
        assert result.lines == ["pipe"]
        assert result.stderr.count(b"Operation not permitted") == 3

    def test_device_nodes_of_the_image_open_nothing(self, box: Box) -> None:
        os.mknod(box.root / "tmp/zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        result = box.run("sh", "-c", "head -c 1 /dev/zero | wc -c; head -c 1 /tmp/zero")
        assert result.lines == ["1"]
        assert b"/tmp/zero: Permission denied" in result.stderr

    def test_nothing_can_be_mounted_even_in_a_user_namespace(self, box: Box) -> None:
        result = box.run("sh", "-c", "unshare -Urm mount -t tmpfs none /tmp && echo mounted")
        assert result.stdout == b""

    def test_paths_of_the_machine_are_masked(self, box: Box) -> None:
        read = "cd /proc; cat kcore keys kpagecount kpageflags kpagecgroup; ls -A /sys/firmware scsi"
        result = box.run("sh", "-c", f"{read}; echo x >/proc/sys/kernel/hostname; echo b >/proc/sysrq-trigger")
        assert "".join(line for line in result.lines if not line.endswith(":")) == ""
        assert b"/proc/sys/kernel/hostname: Read-only file system" in result.stderr


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
    def test_the_caller_passes_signals_on(self, box: Box, number: signal.Signals) -> None:
        name = number.name.removeprefix("SIG")
        script = f"trap 'echo got; exit 9' {name}; echo ready; while :; do sleep 0.02; done"
        caller = box.start("sh", "-c", script)
        assert caller.read_line() == "ready"
        caller.process.send_signal(number)
        result = caller.finish()
        assert (result.outcome, result.lines) == (exited(9), ["got"])

    def test_a_command_that_does_not_listen_is_killed_by_the_second(self, box: Box) -> None:
        caller = box.start("sh", "-c", "echo ready; exec sleep 1000")
        assert caller.read_line() == "ready"
        caller.process.send_signal(signal.SIGINT)
        caller.process.send_signal(signal.SIGTERM)
        assert caller.finish().outcome == Outcome("signaled", 137, 9, "killed by SIGKILL")

    def test_a_caller_that_ignores_signals_ignores_them_alone(self, box: Box) -> None:
        """As under nohup or in the background of a script; SIGCHLD too, as some daemons leave it to their children."""
        traps = "trap 'echo hup' HUP; trap 'exit 9' TERM"
        script = f"grep SigIgn /proc/self/status; {traps}; echo ready; while :; do sleep 0.02; done"
        caller = box.start("sh", "-c", script, before=("sh", "-c", 'trap "" HUP INT QUIT CHLD; exec "$@"', "sh"))
        assert (signals(caller.read_line()), caller.read_line()) == (("SigIgn:", 0), "ready")
        caller.process.send_signal(signal.SIGHUP)
        caller.process.send_signal(signal.SIGTERM)
        result = caller.finish()
        assert (result.outcome, result.lines) == (exited(9), [])

    def test_a_signal_while_the_container_is_made_calls_it_off(self, box: Box) -> None:
        box.intercept("create", 'kill -TERM $PPID; exec "$@"')
        result = box.run("echo", "started")
        assert result.outcome == Outcome("signaled", 143, 15, "stopped before the command started")
        assert result.stdout == b""


class TestPlatform:
    def test_a_failing_runtime_is_no_result(self, box: Box) -> None:
        box.intercept("create", "echo 'no luck' >crun.log; exit 1")
        assert box.run("true").outcome == Outcome("platform", 125, None, "crun create failed: no luck")

    def test_a_runtime_that_dies_without_a_word(self, box: Box) -> None:
        box.intercept("start", "kill -9 $$")
        assert box.run("true").outcome == Outcome("platform", 125, None, "crun start failed: exit code -9")

    def test_a_refusal_of_crun_itself_is_told(self, box: Box) -> None:
        box.intercept("create", 'rm config.json; exec "$@"')
        result = box.run("true")
        assert result.outcome is not None
        assert (result.outcome.kind, result.returncode) == ("platform", 125)
        assert result.outcome.text.startswith("crun create failed: ")
        assert "config.json" in result.outcome.text

    def test_a_file_where_a_mount_point_must_be(self, box: Box) -> None:
        (box.root / "proc").write_text("a file")
        told = "nothing can be mounted at /proc of the image: Not a directory"
        assert box.run("true").outcome == Outcome("platform", 125, None, told)

    def test_a_machine_without_crun(self, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(box.bin))
        outcome = run(box.root, RunConfig(env=(), args=("true",)), state=box.state, container_id="a")
        assert (outcome.kind, outcome.text) == ("platform", "crun is not installed: run scripts/setup")

    def test_a_start_that_hangs_ends(self, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
        box.intercept("start", "exec sleep 1000")
        monkeypatch.setenv("PATH", f"{box.bin}:{os.environ['PATH']}")
        monkeypatch.setattr("dsec_sandbox.crun.START_WITHIN", 0.2)
        outcome = run(box.root, RunConfig(env=(), args=("true",)), state=box.state, container_id="a")
        assert (outcome.kind, outcome.exit_code) == ("platform", 125)
        assert outcome.text == "crun start failed: no end after 0.2 s"

    def test_a_root_that_is_gone(self, box: Box) -> None:
        outcome = run(box.root / "gone", RunConfig(env=(), args=("true",)), state=box.state, container_id="a")
        assert outcome.kind == "platform"

    @pytest.mark.parametrize("container_id", ["", "..", "a/b", "-x", "a b"])
    def test_an_id_is_a_name(self, box: Box, container_id: str) -> None:
        with pytest.raises(Invalid, match="not a container id"):
            run(box.root, RunConfig(env=(), args=("true",)), state=box.state, container_id=container_id)

    def test_an_id_is_used_once_at_a_time(self, box: Box) -> None:
        caller = box.start("sh", "-c", "echo ready; read answer; exit 6")
        assert caller.read_line() == "ready"
        with pytest.raises(Invalid, match=f"{caller.id} exists already"):
            run(box.root, RunConfig(env=(), args=("true",)), state=box.state, container_id=caller.id)
        assert caller.finish(b"go\n").outcome == exited(6)


class TestPlaces:
    @pytest.mark.parametrize("terminal", [False, True])
    def test_a_long_state_path(self, box: Box, tmp_path: Path, terminal: bool) -> None:
        box.state = tmp_path / ("s" * (200 - len(str(tmp_path)) - 1))
        assert len(str(box.state)) == 200
        assert box.run("sh", "-c", "exit 5", terminal=terminal).outcome == exited(5)

    def test_twenty_runs_at_once(self, box: Box) -> None:
        def one(number: int) -> Outcome:
            config = RunConfig(env=(), args=("sh", "-c", f"exit {number}"))
            return run(box.root, config, state=box.state, container_id=f"n{number}")

        with ThreadPoolExecutor(20) as pool:
            assert list(pool.map(one, range(20))) == [exited(number) for number in range(20)]

    def test_callers_at_once(self, box: Box) -> None:
        callers = [box.start("sh", "-c", f"exit {number}") for number in range(6)]
        assert [caller.finish().outcome for caller in callers] == [exited(number) for number in range(6)]

    @pytest.mark.parametrize("propagation", ["private", "shared"])
    def test_the_hosts_mounts_are_not_touched(self, box: Box, tmp_path: Path, propagation: str) -> None:
        """Not even where mounts are shared between namespaces, as systemd has it."""
        host = ("unshare", "--mount", f"--propagation={propagation}", "sh", "-c")
        script = f'cd {tmp_path}; cat /proc/$$/mountinfo >before; "$@"; cat /proc/$$/mountinfo >after'
        assert box.run("true", before=(*host, script, "sh")).outcome == exited(0)
        assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text()

    def test_a_host_with_cgroup_2_alone(self, box: Box) -> None:
        script = 'mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'
        assert box.run("sh", "-c", "exit 5", before=("unshare", "--mount", "sh", "-c", script, "sh")).outcome == exited(
            5
        )

    def test_a_path_that_is_not_utf_8(self, box: Box) -> None:
        root = box.root.rename(box.root.with_name("caf\udce9"))
        outcome = run(root, RunConfig(env=(), args=("true",)), state=box.state, container_id="a")
        assert outcome.kind == "platform"
        root.rename(box.root)


def test_the_status_file_is_json(box: Box) -> None:
    box.run("sh", "-c", "exit 5")
    (status,) = box.state.parent.glob("*.status")
    assert json.loads(status.read_text()) == {"kind": "exited", "exit_code": 5, "signal": None, "text": ""}
