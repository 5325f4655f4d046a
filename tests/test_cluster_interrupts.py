"""Signals at the coordinator: obeyed, held back while a result is written, and ignored by a process that is ending."""

import os
import signal
import threading

import pytest

from scaling_lab.cluster.interrupts import KINDS, Interrupted, heard, held, obeyed


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in KINDS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "preempted")])
def test_a_signal_is_raised_with_its_kind_and_name(number, kind):
    with pytest.raises(Interrupted, match=number.name) as caught, obeyed():
        os.kill(os.getpid(), number)
    assert caught.value.kind == kind


def test_a_process_that_ends_with_an_error_ignores_what_comes_after():
    with pytest.raises(ValueError, match="first"), obeyed():
        raise ValueError("first")
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_block_that_ends_well_puts_the_handlers_of_before_back():
    before = signal.getsignal(signal.SIGTERM)
    with obeyed():
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_written_is_written_to_its_end_and_the_signal_comes_then():
    written = []

    def write():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        written.append("result")

    with pytest.raises(Interrupted, match="SIGTERM"), obeyed(), held():
        write()
    assert written == ["result"]


def test_while_a_job_is_watched_signals_are_collected_and_nothing_is_raised():
    with obeyed():
        with heard() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert (interrupts.signals, interrupts.insistent) == ([signal.SIGINT], False)
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.insistent
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with obeyed():
        os.kill(os.getpid(), signal.SIGHUP)


def test_outside_the_main_thread_nothing_is_heard_and_nothing_fails():
    done = []

    def run():
        with obeyed(), held(), heard() as interrupts:
            done.append(interrupts.signals)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [[]]
