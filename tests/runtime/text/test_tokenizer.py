"""Tokens become text without half characters, and the streamed pieces add up to the whole text."""

import ctypes
import random

import pytest
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.text.detokenizer import StopStrings, make_detokenizer
from sidestream.runtime.text.tokenizer import TooManyTokens, load_tokenizer
from support.pieces import sentencepiece_model

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "naïve café, Ελληνικά, 日本語テキスト, 🦊🦊 emoji 👩‍👩‍👧 end",
    "  leading and  double  spaces\n\n\tand tabs ",
]


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    directory = tmp_path_factory.mktemp("fast")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXTS[0], TEXTS[2]] * 3, trainer)  # other characters stay single bytes
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def piece_directory(tmp_path_factory):
    return sentencepiece_model(tmp_path_factory.mktemp("piece"), [TEXTS[0]] * 200 + TEXTS)


@pytest.fixture(scope="module")
def piece(piece_directory):
    return load_tokenizer(piece_directory)


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_of_bytes_are_those_of_transformers(fast, tmp_path, text):
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text(fast.definition())
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for special in (True, False):
        expected = theirs(text, add_special_tokens=special, return_offsets_mapping=True)
        ids, offsets = fast.encode_with_offsets(text, special, 1000)
        pairs = list(zip(offsets[::2], offsets[1::2], strict=True))
        assert ids == fast.encode(text, special) == expected["input_ids"] and pairs == expected["offset_mapping"]
        assert (pairs[0] == (0, 0)) is special and pairs[-1][1] == len(text)


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_of_pieces_are_those_of_sentencepiece(piece, piece_directory, text):
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(piece_directory / "tokenizer.model"))
    ids, offsets = piece.encode_with_offsets(text, False, 1000)
    pieces = theirs.encode(text, return_type="proto").pieces
    assert ids == [each.id for each in pieces]
    for start, end, each in zip(offsets[::2], offsets[1::2], pieces, strict=True):
        # the last byte of a character has all of it there, the others have nothing; ours all have it
        assert text[start:end] == each.surface or not each.surface
    assert any(not each.surface.isascii() for each in pieces) is not text.isascii()


def test_too_many_tokens_have_no_offsets(fast):
    with pytest.raises(TooManyTokens):
        fast.encode_with_offsets(TEXTS[0], True, 3)


@pytest.mark.parametrize("kind", ["fast", "piece"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_pieces_add_up_and_hold_no_half_character(kind, text, chunk, request):
    tokenizer = request.getfixturevalue(kind)
    prompt, ids = tokenizer.encode("The start"), tokenizer.encode(text)[1:]
    detokenizer = make_detokenizer(tokenizer, prompt, True)
    pieces = [
        detokenizer.push(ids[index : index + chunk], last=index + chunk >= len(ids))
        for index in range(0, len(ids), chunk)
    ]
    assert not any("\ufffd" in piece for piece in pieces)
    whole = tokenizer.decode(prompt + ids)
    assert "The start" + "".join(pieces) == whole
    assert text.strip() in whole


def test_bytes_that_never_become_a_character_come_out_at_the_end(fast):
    start = fast.encode("🦊")[1:]
    assert len(start) > 1
    detokenizer = make_detokenizer(fast, fast.encode("x"), True)
    assert detokenizer.push(start[:1]) == ""
    assert detokenizer.push([], last=True) == "\ufffd"
    endless = make_detokenizer(fast, fast.encode("x"), True)
    assert "".join(endless.push(start[:1]) for _ in range(40)).count("\ufffd") > 20, (
        "an endless run of broken bytes is not held for ever"
    )


def test_special_tokens(fast, piece):
    for tokenizer in (fast, piece):
        ids = tokenizer.encode("dog")
        bos = ids[0]
        assert tokenizer.token_bytes(bos) == b"<s>"
        assert "<s>" not in tokenizer.decode([*ids, bos]) and tokenizer.decode(
            [*ids, bos], skip_special_tokens=False
        ).endswith("<s>")
        assert tokenizer.decode([999999]) == "" and tokenizer.token_bytes(999999) == b""


def test_without_a_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None and load_tokenizer(None) is None


def test_a_tokenizer_model_that_is_not_sentencepiece(tmp_path):
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(RequestError, match=r"put the model's tokenizer\.json next to it"):
        load_tokenizer(tmp_path)


def test_stop_strings():
    stops = StopStrings(("END", "\n\n"), keep=False)
    assert stops.held == 2
    assert stops.find("some EN", 7) is None
    assert stops.find("some END of", 4) == ("END", 5)
    assert stops.find("a\n\nEND", 6) == ("\n\n", 1), "the one that is complete first"
    assert stops.find("END then much more", 4) is None, "what was looked at before is not looked at again"
    assert StopStrings(("END",), keep=True).find("some END", 3) == ("END", 8)


@pytest.mark.parametrize("kind", ["fast", "piece"])
def test_of_a_text_with_too_many_tokens_only_their_number_is_told(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(TEXTS[0])
    assert tokenizer.encode(TEXTS[0], most=len(ids)) == ids
    with pytest.raises(TooManyTokens, match=f"the text has {len(ids)} tokens") as refusal:
        tokenizer.encode(TEXTS[0], most=len(ids) - 1)
    assert refusal.value.tokens == len(ids)


NUMBERS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """malloc.h's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in NUMBERS]


def test_invented_words_take_little_memory(fast) -> None:
    """What is remembered of words is bounded: 12,000 of them took 4 MiB with the library's own bound."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("only glibc reports memory in use")
    libc.mallinfo2.restype = _Mallinfo
    chance = random.Random(0)
    texts = [" ".join("".join(chance.choices("abcdefghijkl", k=9)) for _ in range(100)) for _ in range(120)]
    before = libc.mallinfo2().uordblks
    for text in texts:
        fast.encode(text)
    assert libc.mallinfo2().uordblks - before < 1 << 20
