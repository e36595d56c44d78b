"""Text, stop strings and streams, over a fake model."""

import pytest
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.engine.engine import Engine
from sidestream.runtime.scheduler.scheduler import Scheduler, SchedulerLimits
from sidestream.runtime.text.token_bytes import TokenBytes
from support.fake_runner import FakeRunner, continuation


class Letters:
    """Token i is the letter i."""

    def encode(self, text):
        return [ord(letter) - 97 for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(97 + token) for token in token_ids)

    @property
    def byte_table(self):
        return TokenBytes([bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz"])

    def token_bytes(self, token_id):
        return self.byte_table.pieces[token_id]


def make_engine(overlap=False):
    return Engine(
        Scheduler(SchedulerLimits(20, 320, 4, 64)), FakeRunner(20, vocabulary=26), Letters(), (), overlap=overlap
    )


def generate(engine, params, stream=False, prompt="abc"):
    engine.add(Request("x", prompt, Letters().encode(prompt), params), stream)
    deltas, outputs = [], []
    while engine.has_work:
        some, done = engine.step()
        deltas += some
        outputs += done
    (output,) = outputs
    return output.outputs[0], deltas


TEXT = Letters().decode(continuation([0, 1, 2], -1, 60, 26))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_text(overlap, stream):
    completion, deltas = generate(make_engine(overlap), SamplingParams(temperature=0, max_tokens=60), stream)
    assert completion.text == TEXT and completion.finish_reason == "length"
    if not stream:
        assert deltas == []
        return
    assert "".join(delta.text for delta in deltas) == TEXT
    assert deltas[-1].finish_reason == "length" and all(delta.finish_reason is None for delta in deltas[:-1])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_ends_the_text(overlap, keep, length):
    stop = TEXT[20 : 20 + length]
    at = TEXT.index(stop)
    params = SamplingParams(temperature=0, max_tokens=60, stop=["zzzzzz", stop], include_stop_str_in_output=keep)
    completion, deltas = generate(make_engine(overlap), params, stream=True)
    assert completion.text == TEXT[: at + length * keep]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) == at + length
    assert "".join(delta.text for delta in deltas) == completion.text, "nothing is shown that is cut off later"


def test_a_stop_string_on_the_very_last_token():
    completion, _ = generate(make_engine(), SamplingParams(temperature=0, max_tokens=22, stop=TEXT[15:22]))
    assert (completion.text, completion.finish_reason) == (TEXT[:15], "stop")


def test_a_stop_token_is_not_part_of_the_text():
    token = Letters().encode(TEXT[9])[0]
    at = TEXT.index(TEXT[9])
    completion, _ = generate(make_engine(), SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[token]))
    assert completion.text == TEXT[:at] and completion.token_ids[-1] == token
    completion, _ = generate(
        make_engine(),
        SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[token], include_stop_str_in_output=True),
    )
    assert completion.text == TEXT[: at + 1]


def test_without_detokenization():
    completion, _ = generate(make_engine(), SamplingParams(temperature=0, max_tokens=6, detokenize=False), stream=True)
    assert completion.text == "" and len(completion.token_ids) == 6


def test_a_request_id_is_used_once():
    engine = make_engine()
    engine.add(Request("x", None, [1], SamplingParams()))
    with pytest.raises(RequestError, match="in use"):
        engine.add(Request("x", None, [1], SamplingParams()))
