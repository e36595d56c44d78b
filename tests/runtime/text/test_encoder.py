"""Long prompts are encoded in turns, and only while somebody wants them."""

import threading
import time

from sidestream.runtime.text import encoder as module
from sidestream.runtime.text.encoder import Encoder


class Slow:
    """A tokenizer that waits to be let on; `seen` are the texts that it was given."""

    def __init__(self):
        self.seen = []
        self.go = threading.Semaphore(0)

    def encode(self, text, add_special_tokens):
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
    encoder.put("first", "x", 0)
    until(lambda: tokenizer.seen)
    return encoder


def test_owners_take_turns_and_a_fault_stays_with_its_text():
    tokenizer = Slow()
    encoder = started(tokenizer)
    for key, text, owner in (("a", "aa", 1), ("b", "bad", 1), ("c", "ccc", 1), ("d", "dddd", 2)):
        encoder.put(key, text, owner)
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
        encoder.put(str(round_), "y" * 60, 1)
        assert not encoder.has_room("y" * 60)
        encoder.discard(str(round_))
    encoder.put("last", "zz", 1)
    tokenizer.go.release(2)
    assert outcomes(encoder, 2)[1] == ("last", [2])
    encoder.close()
    assert tokenizer.seen == ["x", "zz"]
