"""Long prompts are encoded in turns, and dropped if their outcome is no longer needed."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
from sidestream.runtime.text import encoder_thread as module
from sidestream.runtime.text.encoder_thread import Encoder


class Slow:
    """A tokenizer that waits to be let on; `seen` are the texts that it was given."""

    def __init__(self):
        self.seen = []
        self.go = threading.Semaphore(0)

    def encode(self, text, add_special_tokens, most):
        self.seen.append(text)
        self.go.acquire()
        if text == "bad":
            raise ValueError(text)
        return [len(text)]


def until(condition):
    """Wait for it; gives up after a minute, which is measured against nothing."""
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


def outcomes(encoder, count):
    found = []
    until(lambda: found.extend(encoder.take()) or len(found) >= count)
    return found


def started(tokenizer):
    encoder = Encoder(tokenizer)
    encoder.put("first", "x", 0, True, 99)
    until(lambda: tokenizer.seen)
    return encoder


def test_owners_take_turns_and_a_fault_stays_with_its_text():
    tokenizer = Slow()
    encoder = started(tokenizer)
    for key, text, owner in (("a", "aa", 1), ("b", "bad", 1), ("c", "ccc", 1), ("d", "dddd", 2)):
        encoder.put(key, text, owner, True, 99)
    tokenizer.go.release(5)
    found = outcomes(encoder, 5)
    encoder.close()
    assert [key for key, _ in found] == ["first", "a", "d", "b", "c"]
    assert found[2][1] == [4]
    assert isinstance(found[3][1], ValueError)


def test_what_nobody_wants_any_more_is_neither_encoded_nor_kept(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHARACTERS", 100)
    tokenizer = Slow()
    encoder = started(tokenizer)
    for round_ in range(50):
        assert encoder.has_room("y" * 60)
        encoder.put(str(round_), "y" * 60, 1, True, 99)
        assert not encoder.has_room("y" * 60)
        encoder.discard(str(round_))
    encoder.put("last", "zz", 1, True, 99)
    tokenizer.go.release(2)
    assert outcomes(encoder, 2)[1] == ("last", [2])
    encoder.close()
    assert tokenizer.seen == ["x", "zz"]


class Ids(list):
    """A list that can be watched."""


def test_an_outcome_that_was_taken_is_kept_no_longer():
    tokenizer = Slow()
    encoder = started(tokenizer)
    encoder.put_work("work", partial(Ids, [1, 2]), 1, 0)
    tokenizer.go.release()
    found = outcomes(encoder, 2)
    kept = weakref.ref(found[1][1])
    del found
    until(lambda: gc.collect() >= 0 and kept() is None)
    encoder.close()


MEASURE = """
import random, re, sys, time
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.text.encoder_thread import Encoder
from sidestream.runtime.text.tokenizer import load_tokenizer

def mib(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

encoder, source = Encoder(load_tokenizer(DEMO_MODEL)), random.Random(0)
before, text = mib("VmRSS"), "".join(source.choice("abcdefgh ") for _ in range(1_000_000))
for key in "abc":
    encoder.put(key, text, 0, True, int(sys.argv[1]))
    while not encoder.take():
        time.sleep(0.01)
encoder.close()
print(mib("VmHWM") - before, mib("VmRSS") - before)
"""


@pytest.mark.parametrize(("tokens", "share"), [(1 << 20, 0.5), (1000, 0.25)], ids=["within", "above"])
def test_what_a_long_prompt_takes_is_given_back(tokens, share):
    """Malloc by itself keeps nearly all of it: a small piece lies at the end of its arena. Of a list of ids Python
    keeps some; of a text with too many tokens none is made.
    """
    command = [sys.executable, "-c", MEASURE, str(tokens)]
    most, kept = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert most > 100 and kept < most * share
