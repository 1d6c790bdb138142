"""Identity and end of processes that are not our children, locks by key, the gate, and work in threads."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import pytest

from dsec_snapshotter.gate import Gate
from dsec_snapshotter.keylocks import KeyLocks
from dsec_snapshotter.processes import ExitWatch, Process, kill_child, last_line, spawn, terminate, wait_ended
from dsec_store.errors import Invalid, Unavailable
from dsec_store.parallel import in_parallel
from tests.dsec_snapshotter.nodes import owner_process, until

WITHIN = 20.0


def test_a_process_is_its_id_and_its_start() -> None:
    me = Process.of(os.getpid())
    assert me
    assert me.alive()
    assert Process.from_json(me.as_json()) == me
    assert not Process(me.pid, me.started + 1).alive()
    assert Process.of(2**22 + 1) is None


def test_the_end_of_a_process_is_told_once(tmp_path: Path) -> None:
    told: Queue[Process] = Queue()
    watch = ExitWatch()
    with owner_process() as (process, record):
        identity = Process.from_json(record)
        watch.watch(identity, told.put)
        watch.watch(identity, told.put)
        assert not wait_ended(identity, 0.0)
        process.kill()
        assert told.get(timeout=WITHIN) == identity
        watch.watch(identity, told.put)  # it has ended before
        assert told.get(timeout=WITHIN) == identity
        assert told.empty()


def test_who_is_forgotten_is_not_told() -> None:
    told: Queue[Process] = Queue()
    watch = ExitWatch()
    with owner_process() as (one, first), owner_process() as (two, second):
        for record in (first, second):
            watch.watch(Process.from_json(record), told.put)
        watch.forget(Process.from_json(first))
        one.kill()
        one.wait()
        two.kill()
        assert told.get(timeout=WITHIN) == Process.from_json(second)
        assert told.empty()


def test_an_end_is_told_once_there_is_a_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Queue[Process] = Queue()
    watch = ExitWatch()
    refusals = iter([True, True])
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("ended-") and next(refusals, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with owner_process() as (process, record):
        watch.watch(Process.from_json(record), told.put)
        process.kill()
        assert told.get(timeout=WITHIN) == Process.from_json(record)
    assert next(refusals, None) is None


def test_a_process_that_cannot_be_looked_at_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    me = Process.of(os.getpid())
    assert me

    def refuse(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(OSError, match="Too many"):
        me.alive()


def test_a_child_is_ended_without_a_descriptor(tmp_path: Path) -> None:
    process = spawn(["sleep", "600"], tmp_path / "log", os.environ)
    kill_child(process)
    assert not Path(f"/proc/{process.pid}").exists()
    kill_child(process)


def test_a_program_is_started_detached_and_logs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = "import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read() == '', os.environ['X'])"
    process = spawn([sys.executable, "-c", program], log, {"X": "x"})
    assert wait_ended(process, WITHIN)
    assert last_line(log) == "True True x"
    with pytest.raises(OSError, match="No such file"):
        spawn(["/no/such/program"], log, {})


def test_terminate_ends_also_who_does_not_want_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    process = spawn([sys.executable, "-c", program], log, os.environ)
    until(lambda: last_line(log) == "ready")
    terminate(process, 0.1)
    assert not process.alive()
    assert not Path(f"/proc/{process.pid}").exists()
    terminate(process, 0.1)


def test_no_output_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\n\n")
    assert last_line(tmp_path / "log") == "it said nothing"


def test_a_key_is_held_by_one_and_others_are_free() -> None:
    locks: KeyLocks[str] = KeyLocks()
    order: Queue[str] = Queue()

    def enter() -> None:
        with locks("a"):
            order.put("second")

    with locks("a"):
        thread = threading.Thread(target=enter)
        thread.start()
        with locks("b"):
            order.put("first")
    thread.join()
    assert [order.get(), order.get()] == ["first", "second"]
    assert not locks._locks


def test_who_is_alone_waits_for_the_others_and_then_nobody_enters() -> None:
    gate = Gate()
    order: Queue[str] = Queue()

    def alone() -> None:
        with gate.alone():
            order.put("alone")
            gate.close()

    with gate.shared():
        thread = threading.Thread(target=alone)
        thread.start()
        order.put("shared")
    thread.join()
    assert [order.get(), order.get()] == ["shared", "alone"]
    with pytest.raises(Unavailable, match="stopping"), gate.shared():
        pass
    gate.open()
    with gate.shared():
        pass


def test_who_is_alone_does_not_wait_for_ever() -> None:
    gate = Gate()
    with gate.shared():
        with pytest.raises(Unavailable, match="under way"), gate.alone(0.01):
            pass
        with gate.shared():  # who has given up keeps nobody out
            pass
        with gate.alone(0.01, anyway=True), pytest.raises(Unavailable, match="under way"), gate.alone(0.01):
            pass


def test_a_key_is_not_waited_for_for_ever() -> None:
    locks: KeyLocks[str] = KeyLocks()
    with locks("a"):
        with pytest.raises(TimeoutError, match="a is held"), locks("a", 0.01):
            pass
        with locks("b", 0.01):
            pass
    assert not locks._locks


def test_parallel_work_is_done_once_each_and_fails_as_a_whole() -> None:
    done: Queue[int] = Queue()
    in_parallel(done.put, range(100), 8)
    assert sorted(done.get() for _ in range(100)) == list(range(100))

    def refuse(number: int) -> None:
        raise Invalid(f"number {number}")

    with pytest.raises(Invalid, match="number"):
        in_parallel(refuse, range(100), 8)
    in_parallel(refuse, [], 8)


def test_a_zombie_has_ended() -> None:
    process = subprocess.Popen(["true"])
    try:
        until(lambda: Process.of(process.pid) is None)
        assert Path(f"/proc/{process.pid}").exists()
    finally:
        process.wait()
