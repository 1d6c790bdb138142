"""Signals: kept, passed on, escalated; never lost and never left changed."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from dsec_sandbox.forwarding import FORWARDED, Forwarding
from dsec_sandbox.outcome import NotStartedError

LISTENER = "trap 'echo hup' HUP; trap 'echo term' TERM; echo ready; while :; do sleep 0.02; done"


@pytest.fixture
def listener() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sh", "-c", LISTENER], stdout=subprocess.PIPE) as child:
        assert line(child) == b"ready\n"
        yield child
        child.kill()


def line(child: subprocess.Popen[bytes]) -> bytes:
    assert child.stdout is not None
    return child.stdout.readline()


def test_a_signal_before_the_start_calls_the_run_off() -> None:
    with Forwarding() as signals:
        signals.check()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(NotStartedError) as caught:
            signals.check()
    assert caught.value.outcome.exit_code == 128 + signal.SIGTERM
    assert caught.value.outcome.kind == "signaled"


def test_signals_go_on_and_the_kept_ones_first(listener: subprocess.Popen[bytes]) -> None:
    with Forwarding() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        with signals.aimed_at(listener.pid):
            assert line(listener) == b"hup\n"
            os.kill(os.getpid(), signal.SIGTERM)
            assert line(listener) == b"term\n"
            os.kill(os.getpid(), signal.SIGHUP)
            assert line(listener) == b"hup\n"


def test_a_signal_that_does_not_interrupt_the_wait_is_passed_on(listener: subprocess.Popen[bytes]) -> None:
    """As one that comes just before the wait does not. Here another thread takes it, so that it happens every time."""

    def take() -> None:
        for _ in range(2):  # the second one kills
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            assert line(listener) in (b"term\n", b"")

    with Forwarding() as signals, signals.aimed_at(listener.pid):
        taker = threading.Thread(target=take)
        taker.start()
        signals.wait(listener.pid)
        taker.join()
    assert listener.wait() == -signal.SIGKILL


def test_the_second_stop_kills(listener: subprocess.Popen[bytes]) -> None:
    with Forwarding() as signals, signals.aimed_at(listener.pid):
        os.kill(os.getpid(), signal.SIGTERM)
        assert line(listener) == b"term\n"
        os.kill(os.getpid(), signal.SIGINT)
        assert listener.wait() == -signal.SIGKILL


def test_handlers_are_given_back_and_ignored_signals_stay_ignored(listener: subprocess.Popen[bytes]) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before = [signal.getsignal(number) for number in FORWARDED]
        with Forwarding() as signals, signals.aimed_at(listener.pid):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            assert line(listener) == b"term\n"
        assert [signal.getsignal(number) for number in FORWARDED] == before
    finally:
        signal.signal(signal.SIGHUP, former)


def test_another_thread_forwards_nothing_and_does_not_fail() -> None:
    before = [signal.getsignal(number) for number in FORWARDED]
    inside: list[object] = []

    def work() -> None:
        with Forwarding():
            inside.extend(signal.getsignal(number) for number in FORWARDED)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == before
