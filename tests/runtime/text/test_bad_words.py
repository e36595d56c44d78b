"""The words of `bad_words` become the token sequences that vLLM makes of them."""

from pathlib import Path

import pytest
import tokenizers
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.text.prompts import bad_word_ids
from sidestream.runtime.text.tokenizer import FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["ab", " ab", "a", "c", "cab", "ab c", "  b", "aa"]
PIECES = ["<s>", "a", "b", "c", "\u0120", "ab", "\u0120a", "\u0120ab", "\u0120c"]
MERGES = [("a", "b"), ("\u0120", "a"), ("\u0120a", "b"), ("\u0120", "c")]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2 and Llama 3: a space belongs to the word after it."""
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: place for place, piece in enumerate(PIECES)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: every text begins with a space."""
    pieces = {piece.replace("\u0120", "\u2581"): place for place, piece in enumerate(PIECES)}
    merges = [(left.replace("\u0120", "\u2581"), right) for left, right in MERGES]
    tokenizer = tokenizers.Tokenizer(models.BPE(pieces, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return tokenizer


def vllm_ids(words: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """`SamplingParams.update_from_tokenizer` of vLLM 0.11, over transformers."""
    found: list[list[int]] = []
    for word in words:
        for prefix in ("", " "):
            ids = tokenizer.encode(text=prefix + word.lstrip(), add_special_tokens=False)
            if not prefix or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return found


@pytest.mark.parametrize("kind", [byte_level, metaspace])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_token_sequences_are_those_of_vllm(kind, adds_bos: bool, tmp_path: Path) -> None:
    made = kind()
    if adds_bos:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(tmp_path / "tokenizer.json"))
    ours = bad_word_ids(WORDS, FastTokenizer(tmp_path / "tokenizer.json"), len(PIECES))
    assert list(map(list, ours)) == vllm_ids(WORDS, PreTrainedTokenizerFast(tokenizer_object=made))
    assert any(len(ids) == 1 for ids in ours) and any(len(ids) > 1 for ids in ours)


def test_words_that_cannot_be_banned(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "bytes.json"))
    tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "two.json"))
    tokenizer, two = FastTokenizer(tmp_path / "bytes.json"), FastTokenizer(tmp_path / "two.json")
    assert bad_word_ids([], None, 5) == ()
    for words, given, vocabulary, expected in (
        (["a"], None, 9, "bad_words need a tokenizer"),
        (["a", "x"], tokenizer, 9, "no tokens for 'x'"),
        (["a", "cab"], tokenizer, 7, "'cab' has a token outside the model's vocabulary of 7"),
        (["a", "b"], two, 2, "bans every token"),
    ):
        with pytest.raises(RequestError, match=f"prompt 3: .*{expected}"):
            bad_word_ids(words, given, vocabulary, "prompt 3: ")
