"""The quick detokenizer says what the tokenizer says of the whole, whatever the tokens and wherever the prompt ends."""

import random

import pytest
from sidestream.runtime.text.detokenizer import ByteDetokenizer, Detokenizer, make_detokenizer
from sidestream.runtime.text.tokenizer import FastTokenizer, letters
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEXT = "Grüße, 世界! 👩‍🚀 naïve café — ½ \u200b\n\ttabs"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes, some merges across and within characters, special and added tokens (some of whose letters stand for no
    byte).
    """
    alphabet = letters()
    vocabulary = {letter: byte for byte, letter in enumerate(alphabet)}
    merges = []
    for text in ("é", "世", "界!", " na"):
        parts = [alphabet[byte] for byte in text.encode()]
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts[:2] = [parts[0] + parts[1]]
            vocabulary.setdefault(parts[0], len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    made.add_tokens([AddedToken("<tool>"), AddedToken("日 本")])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return FastTokenizer(path)


@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens_read_like_the_whole(tokenizer, skip):
    generator = random.Random(int(skip))
    size = len(tokenizer.byte_table(skip).pieces)
    for _ in range(500):
        ids = [generator.randrange(size) for _ in range(generator.randint(1, 30))]
        detokenizer = make_detokenizer(tokenizer, [], skip)
        assert isinstance(detokenizer, ByteDetokenizer)
        cuts = sorted(generator.sample(range(len(ids) + 1), min(3, len(ids))))
        parts = [ids[first:last] for first, last in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        text = "".join(detokenizer.push(part, last=index == len(parts) - 1) for index, part in enumerate(parts))
        assert text == tokenizer.decode(ids, skip)


def test_a_stream_never_shows_half_a_character(tokenizer):
    ids = tokenizer.encode(TEXT)
    detokenizer = make_detokenizer(tokenizer, [], True)
    shown = ""
    for index, token in enumerate(ids):
        shown += detokenizer.push([token], last=index == len(ids) - 1)
        assert TEXT.startswith(shown)
    assert shown == TEXT


def test_a_prompt_that_ends_within_a_character(tokenizer):
    ids = [*"a世".encode()]
    detokenizer = make_detokenizer(tokenizer, ids[:2], True)
    assert isinstance(detokenizer, ByteDetokenizer)
    assert detokenizer.push(ids[2:], last=True) == "世"


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer):
    assert make_detokenizer(tokenizer, [], True).push([10**6], last=True) == ""


def test_other_decoders_are_left_to_the_thorough_one(tmp_path):
    made = Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[]))
    made.decoder = decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert isinstance(make_detokenizer(FastTokenizer(tmp_path / "tokenizer.json"), [], True), Detokenizer)
