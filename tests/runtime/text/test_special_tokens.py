"""A directory's tokenizer has the special and added tokens of transformers' AutoTokenizer, and its ids."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from sidestream.runtime.text.special_tokens import TokenFiles
from sidestream.runtime.text.tokenizer import load_tokenizer
from support.tiny_tokenizers import byte_level, metaspace

PIECES = 330
WORDS = ["a river runs to the sea", "user assistant system", "one two three four five, six. Seven!"]
TEXTS = [
    "the river",
    "  two  spaces and one ",
    "\tline\nsea\u00a0\U0001f30a \u0416",
    "<s>sea</s>river<unk> <s> to</s>",
    "\u2581sea",
    "",
    "<|start|>user\nsea<|end|> <pad> river<call>x <call> y<image>",
]
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ENDS = {"add_bos_token": True, "add_eos_token": False}
END = {"content": "<|end|>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
DECODER = {
    str(PIECES): {"content": "<|start|>", "special": True},
    str(PIECES + 1): {"content": "<call>", "special": False, "lstrip": True, "normalized": False},
}
STYLES = [{"legacy": True}, {"legacy": False}, {}, {"legacy": False, "add_prefix_space": False}]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"pad_token": "<pad>", "add_bos_token": False, "add_eos_token": True},
    {"additional_special_tokens": ["<call>", "<|start|>"]},
    {"extra_special_tokens": ["<call>", {**END, "__type": "AddedToken"}]},
    {"extra_special_tokens": {"image_token": "<image>"}, "call_token": "<call>"},
    {"eos_token": {**END, "__type": "AddedToken"}, "add_eos_token": True},
    {"added_tokens_decoder": DECODER, "pad_token": "<call>"},
]
MAP = {"pad_token": {**END, "content": "<pad>", "lstrip": True}, "eos_token": "<|end|>"}
FILES: list[dict[str, Any]] = [
    {},
    {"added_tokens.json": {"<|start|>": PIECES, "<call>": PIECES + 1}},
    {"special_tokens_map.json": MAP},
    {"added_tokens.json": {"<|end|>": PIECES}, "special_tokens_map.json": MAP},
]


def write(directory: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


def check(directory: Path) -> None:
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    assert ours is not None
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, special) == theirs(text, add_special_tokens=special)["input_ids"], text
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert TokenFiles.of(directory).named == theirs.special_tokens_map


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tokenizer.model files: as Llama 2's, with marks of its own and another normalizer, and of the other algorithm."""
    directory = tmp_path_factory.mktemp("models")
    (directory / "text").write_text("\n".join(WORDS * 60))
    made = {}
    for name, options in {
        "bpe": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        "marked": {"model_type": "bpe", "user_defined_symbols": ["<call>"], "control_symbols": ["<|start|>"]},
        "unigram": {"model_type": "unigram", "vocab_size": 300},
    }.items():
        sentencepiece.SentencePieceTrainer.train(
            **{"input": str(directory / "text"), "model_prefix": str(directory / name), "vocab_size": PIECES}
            | {"byte_fallback": True, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
            | options
        )
        made[name] = directory / f"{name}.model"
    return made


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("files", FILES, ids=lambda files: "+".join(files) or "alone")
def test_a_sentencepiece_model(
    models: dict[str, Path], family: str, style: dict[str, Any], files: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(models["bpe"].read_bytes())
    write(tmp_path, files | {"config.json": {"model_type": family}})
    for extra in EXTRAS:
        write(tmp_path, {"tokenizer_config.json": LLAMA | ENDS | style | extra})
        check(tmp_path)


@pytest.mark.parametrize("name", ["marked", "unigram"])
def test_sentencepiece_models_of_other_kinds(models: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Pieces that are never split, another normalizer, and the unigram algorithm."""
    (tmp_path / "tokenizer.model").write_bytes(models[name].read_bytes())
    write(tmp_path, {"config.json": {"model_type": "mistral"}, "tokenizer_config.json": LLAMA | ENDS})
    check(tmp_path)


def test_a_sentencepiece_model_without_any_other_file(models: dict[str, Path], tmp_path: Path) -> None:
    """Its own BOS begins a text, as Llama 2's texts began."""
    (tmp_path / "tokenizer.model").write_bytes(models["bpe"].read_bytes())
    ours, theirs = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_file=str(models["bpe"]))
    assert ours is not None
    for text in ("the river", "two  spaces", "sea \U0001f30a"):
        assert ours.encode(text) == theirs.encode(text, add_bos=True)
    assert ours.encode("<s>sea</s>", False)[::2] == [theirs.bos_id(), theirs.eos_id()]


@pytest.mark.parametrize("kind", [byte_level, metaspace])
@pytest.mark.parametrize("files", FILES, ids=lambda files: "+".join(files) or "alone")
def test_a_tokenizer_json_without_the_tokens(kind: Any, files: dict[str, Any], tmp_path: Path) -> None:
    kind(["<s>", "</s>", "<unk>"], "<s>").save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, files | {"config.json": {"model_type": "llama"}})
    for extra in EXTRAS:
        named = LLAMA | {"tokenizer_class": "PreTrainedTokenizerFast"} | extra
        write(tmp_path, {"tokenizer_config.json": named})
        check(tmp_path)
