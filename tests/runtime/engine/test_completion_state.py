"""Log-probabilities of tokens that are parts of characters: their bytes, and where in the text they begin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.engine.completion_state import CompletionState
from sidestream.runtime.scheduler.sequence import Sequence
from sidestream.runtime.scheduler.step_plan import StepResult
from sidestream.runtime.text.tokenizer import FastTokenizer
from support.byte_fallback import byte_fallback_tokenizer

BOS, EOS = 1, 2
EXAMPLES = settings(max_examples=50, deadline=None)
TEXTS = st.text("ab T🎈🇺🇦漢ő\u200d\u0301½", min_size=1, max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_fallback_tokenizer(path)
    return FastTokenizer(path)


def begin(tokenizer, prompt, eager=True, **params):
    """A completion of a prompt that has no token yet."""
    asked = SamplingParams(max_tokens=100, **params)
    sequence = Sequence(0, "x", 0, list(prompt), len(prompt), 1000, asked, 0, frozenset(), frozenset({EOS}))
    return CompletionState(sequence, tokenizer, eager)


def complete(completion, tokens, others=(5, 6)):
    """Feed tokens, the last of which ends it; returns the texts that a stream would show."""
    shown, sequence = [], completion.sequence
    for index, token in enumerate(tokens):
        sequence.tokens.append(token)
        last = index == len(tokens) - 1
        ids = np.array([[token, *others]], np.int32)
        values = np.array([[-0.5 - place for place in range(1 + len(others))]], np.float32)
        result = StepResult(0, ids[:, 0], ids, values, np.array([1], np.int32))
        if last:
            sequence.finish_reason = "stop" if token == EOS else "length"
            sequence.status = type(sequence.status).FINISHED
        stop = completion.accept(token, 0, result)
        shown.append(completion.new_text())
        if stop is not None:
            break
    return shown


@EXAMPLES
@given(TEXTS, st.booleans())
def test_bytes_are_those_of_the_text_and_offsets_where_they_begin(tokenizer, text, eager):
    prompt, answer = tokenizer.encode("the party"), tokenizer.encode("a" + text, add_special_tokens=False)
    completion = begin(tokenizer, prompt, eager, logprobs=2)
    complete(completion, answer)
    output = completion.output()
    assert output.text == f" a{text}" and output.text_offsets is not None and output.logprobs is not None
    pieces = [entry[token].token_bytes for token, entry in zip(answer, output.logprobs, strict=True)]
    assert b"".join(pieces) == output.text.encode()
    position = 0
    for piece, offset in zip(pieces, output.text_offsets, strict=True):
        before = len(output.text[:offset].encode())
        character = output.text[offset].encode()
        assert before <= position < before + len(character), "the character that holds the token's first byte"
        position += len(piece)


def test_the_first_token_of_a_text_has_no_space(tokenizer):
    for prompt, text in (([BOS], "the"), ([BOS, BOS], "the"), (tokenizer.encode("the"), " the")):
        completion = begin(tokenizer, prompt, logprobs=2)
        (token,) = tokenizer.encode("the", add_special_tokens=False)
        complete(completion, [token], others=(token, tokenizer.encode("a", add_special_tokens=False)[0]))
        entry = completion.output().logprobs[0]
        assert completion.text == text == entry[token].decoded_token == entry[token].token_bytes.decode()


def test_no_offset_is_beyond_a_text_that_a_stop_string_cuts(tokenizer):
    answer = tokenizer.encode("a🎈TP🎈", add_special_tokens=False)
    completion = begin(tokenizer, tokenizer.encode("the"), logprobs=0, stop=["🎈TP"])
    assert "".join(complete(completion, answer)) == completion.text == " a"
    output = completion.output()
    assert len(output.text_offsets) == len(output.logprobs) == len(completion.sequence.output_ids)
    assert max(output.text_offsets) == completion.last_logprobs()[1] == 2


@pytest.mark.parametrize(
    ("stop", "text"), [("🎈", " ab"), ("b🎈", " a"), ("\u200d", " ab🎈🎈"), ("漢", " ab🎈🎈\u200dT")]
)
def test_stop_strings_of_split_characters(tokenizer, stop, text):
    answer = tokenizer.encode("ab🎈🎈\u200dT漢字", add_special_tokens=False)
    for keep in (False, True):
        completion = begin(tokenizer, tokenizer.encode("🎈🎈🎈"), stop=[stop], include_stop_str_in_output=keep)
        shown = complete(completion, answer)
        assert completion.text == "".join(shown) == text + stop * keep


def test_special_tokens_take_no_room_in_the_offsets(tokenizer):
    (letter,) = tokenizer.encode("the", add_special_tokens=False)
    completion = begin(tokenizer, [letter], logprobs=0)
    complete(completion, [BOS, letter, BOS, letter, EOS])
    output = completion.output()
    assert output.text == " the the" and output.text_offsets == [0, 0, 4, 4, 8]
    assert [next(iter(entry.values())).decoded_token for entry in output.logprobs] == [
        "<s>",
        " the",
        "<s>",
        " the",
        "</s>",
    ]


def test_broken_bytes_have_offsets_too(tokenizer):
    half = [3 + byte for byte in "漢".encode()[:2]]
    (word,) = tokenizer.encode("the", add_special_tokens=False)
    completion = begin(tokenizer, [word], logprobs=0)
    complete(completion, [*half, word])
    output = completion.output()
    assert output.text == "\ufffd\ufffd the" and output.text_offsets == [0, 0, 2]


def test_an_answer_that_goes_on_elsewhere_within_a_character(tokenizer):
    """Its text and its offsets are those of the whole, wherever it moves."""
    prompt, answer = tokenizer.encode("🎈"), tokenizer.encode("a🎈\u0301🎈b", add_special_tokens=False)
    whole = begin(tokenizer, prompt, logprobs=0)
    complete(whole, answer)
    for cut in range(1, len(answer)):
        first = begin(tokenizer, prompt, logprobs=0)
        shown = []
        for token in answer[:cut]:
            first.sequence.tokens.append(token)
            result = StepResult(0, *[np.array([[token]], np.int32)] * 2, np.zeros((1, 1)), np.array([1]))
            first.accept(token, 0, result)
            shown.append(first.new_text())
        second = begin(tokenizer, prompt, logprobs=0)
        second.sequence.tokens += answer[:cut]
        second.resume(first.shown)
        shown += complete(second, answer[cut:])
        assert "".join(shown) == whole.text
        assert second.output().text_offsets == whole.output().text_offsets[cut:]
        with pytest.raises(RequestError, match="exceeds the"):
            begin_again = begin(tokenizer, prompt)
            begin_again.sequence.tokens += answer[:cut]
            begin_again.resume(len(first.text) + 1)


def test_without_text_all_offsets_are_zero(tokenizer):
    for each in (None, tokenizer):
        completion = begin(each, [BOS], logprobs=1, detokenize=each is None)
        complete(completion, [9, 10, EOS])
        output = completion.output()
        assert output.text == "" and output.text_offsets == [0, 0, 0]
        assert all(entry.token_bytes is None for place in output.logprobs for entry in place.values())
