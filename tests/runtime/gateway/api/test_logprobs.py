"""Log-probabilities in OpenAI's formats: no token is lost, and offsets are right."""

import pytest
from sidestream.runtime.gateway.api.completions import Echo
from sidestream.runtime.gateway.api.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, text_of
from sidestream.runtime.protocol.messages import TokenLogprob
from sidestream.runtime.text.tokenizer import FastTokenizer
from support.byte_fallback import byte_fallback_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_fallback_tokenizer(path)
    return FastTokenizer(path)


def place(*tokens):
    """One place: the chosen token first; each (id, bytes, rank)."""
    return [TokenLogprob(token, -float(rank), rank, piece) for token, piece, rank in tokens]


def test_parts_of_characters_are_spelled_by_their_bytes():
    assert text_of(TokenLogprob(1, -1.0, 1, b"\xe2\x82")) == "bytes:\\xe2\\x82"
    assert text_of(TokenLogprob(1, -1.0, 1, "€".encode())) == "€"
    assert text_of(TokenLogprob(7, -1.0, 1)) == "token_id:7"


def test_tokens_of_the_same_text_keep_their_entries():
    """A letter and the byte that is the letter; parts of characters; ids that have no text."""
    letters = place((70, b"A", 2), (5, b"A", 1), (9, b"", 3), (10, b"", 4))
    marks = place((80, b"\xe2\x82", 1), (81, b"\xe2", 2), (82, b"\xf0", 3))
    reported = completion_logprobs([letters, marks], [0, 1], 4)
    assert reported.tokens == ["A", "bytes:\\xe2\\x82"]
    assert reported.top_logprobs == [
        {"token_id:5": -1.0, "A": -2.0, "": -3.0, "token_id:10": -4.0},
        {"bytes:\\xe2\\x82": -1.0, "bytes:\\xe2": -2.0, "bytes:\\xf0": -3.0},
    ]


@pytest.mark.parametrize("top", [0, 1, 2, 3])
def test_the_token_itself_is_always_among_the_likeliest(top):
    reported = completion_logprobs([place((4, b"far", 40), (1, b"a", 1), (2, b"b", 2), (3, b"c", 3))], [0], top)
    assert reported.top_logprobs == [dict([("a", -1.0), ("b", -2.0), ("c", -3.0)][:top]) | {"far": -40.0}]
    assert next(iter(reported.top_logprobs[0])) == "far", "the first one, as in vLLM"


def test_minus_one_is_all_tokens_that_the_engine_sent():
    entry = place((4, b"far", 40), (1, b"a", 1), (2, b"b", 2))
    assert completion_logprobs([entry], [0], -1).top_logprobs == [{"a": -1.0, "b": -2.0, "far": -40.0}]
    assert [each.token for each in chat_logprobs([entry], -1).content[0].top_logprobs] == ["a", "b", "far"]
    assert list(prompt_logprobs([entry], -1)[1]) == ["4", "1", "2"]


def test_a_chat_has_the_token_itself_too():
    """Without alternatives there are none, as in OpenAI's answers."""
    entry = place((4, b"far", 40), (1, b"a", 1), (2, b"b", 2))
    for top, expected in ((0, []), (1, ["a", "far"]), (2, ["a", "b", "far"])):
        (reported,) = chat_logprobs([entry], top).content
        assert [each.token for each in reported.top_logprobs] == expected
    (reported,) = chat_logprobs([place((1, b"a", 1), (1, b"a", 1), (2, b"b", 2))], 2).content
    assert [each.token for each in reported.top_logprobs] == ["a", "b"]


def test_chats_and_prompts_have_the_bytes():
    places = [place((1, "é".encode()[:1], 1), (2, b"\xff", 2)), place((3, "é".encode()[1:], 1))]
    chat = chat_logprobs(places, 2).content
    assert b"".join(bytes(each.bytes) for each in chat).decode() == "é"
    assert [top.bytes for top in chat[0].top_logprobs] == [[0xC3], [0xFF]]
    assert prompt_logprobs(places, 2)[1]["2"].decoded_token == "\ufffd"


@pytest.mark.parametrize("text", ["the party", " the", "🎈 the 🎈🎈", "漢", "  \n the,the", "日日é"])
def test_an_echo_of_a_text_finds_its_tokens(tokenizer, text):
    """The tokens after the first, which the engine puts in front, begin with the text's first word."""
    ids = tokenizer.encode(text)
    echo = Echo(text, "<s>", len(ids) - 1)
    echo.add_scores([place((token, tokenizer.token_bytes(token), 1), (0, b" x", 2)) for token in ids[1:]])
    reported = echo.logprobs([place((5, b" on", 1))], [0], 2)
    assert reported.tokens[0] == "<s>" and reported.text_offset[0] == 0
    assert reported.tokens[-1] == " on" and reported.text_offset[-1] == len(text)
    position = 0
    for token, offset, top in zip(
        reported.tokens[1:-1], reported.text_offset[1:], reported.top_logprobs[1:], strict=False
    ):
        assert token in top and len(text[:offset].encode()) <= position
        piece = bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        assert text.encode()[position : position + len(piece)] == piece
        position += len(piece)
    assert position == len(text.encode())


@pytest.mark.parametrize("text", ["🎈 the", "the 漢", "é"])
def test_an_echo_of_ids_begins_with_their_first_token(tokenizer, text):
    ids = tokenizer.encode(text)[1:]
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    echo = Echo(decoded, tokenizer.decode(ids[:1], skip_special_tokens=False), len(ids) - 1)
    echo.add_scores([place((token, tokenizer.token_bytes(token), 1)) for token in ids[1:]])
    reported = echo.logprobs([], [], 1)
    whole = [token for token in reported.tokens if not token.startswith("bytes:")]
    assert len(reported.tokens) == len(reported.text_offset) == len(ids) and max(reported.text_offset) <= len(decoded)
    for token, offset in zip(reported.tokens, reported.text_offset, strict=True):
        assert token not in whole or decoded[offset : offset + len(token)] == token


def test_an_echo_that_its_tokens_do_not_spell_stays_within_the_text(tokenizer):
    """A normalizer changed the text."""
    echo = Echo("ＴＰ", "T", 3)
    echo.add_scores([place((1, b"P", 1)), place((2, b" and more", 1)), place((3, b"!", 1))])
    reported = echo.logprobs([], [], 0)
    assert reported.tokens == ["T", "P", " and more", "!"] and max(reported.text_offset) <= 2
    assert reported.text_offset == sorted(reported.text_offset)
