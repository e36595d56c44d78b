"""A helper process is closed by one thread while another one waits for its answer."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sidestream.runtime.processes.helper_process import HelperProcess

SLEEPER = (
    "import sys, time; print(flush=True); [time.sleep(int(line)) or print('done', flush=True) for line in sys.stdin]"
)


def make() -> HelperProcess:
    return HelperProcess([sys.executable, "-c", SLEEPER], 100)


def test_close_ends_a_waiting_call_with_an_oserror_and_the_next_one_starts_a_child():
    for _ in range(5):
        helper = make()
        assert helper.ask(b"0\n", 60) == b"done\n"
        child = helper._child
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(helper.ask, b"600\n", 600)
            while not helper._lock.locked():
                time.sleep(0.001)
            helper.close()
            assert isinstance(waiting.exception(), OSError)
        assert child.poll() is not None and child.stdout.closed and child.stdin.closed
        assert helper.ask(b"0\n", 60) == b"done\n"
        helper.close()
        assert helper._child is None


def test_a_call_that_takes_too_long_raises_timeouterror_and_ends_the_child():
    helper = make()
    helper.ask(b"0\n", 60)
    child = helper._child
    with pytest.raises(TimeoutError):
        helper.ask(b"600\n", 0.01)
    assert child.poll() is not None and helper._child is None


def test_calls_of_two_threads_take_turns():
    helper, answers = make(), list[bytes]()
    threads = [threading.Thread(target=lambda: answers.append(helper.ask(b"0\n", 60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    helper.close()
    assert answers == [b"done\n"] * 4
