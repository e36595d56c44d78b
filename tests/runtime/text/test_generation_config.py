"""Which tokens end a text, and a model's sampling defaults: as transformers reads the same files, and in the engine."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from sidestream import LLM, RequestError, SamplingParams
from sidestream.compiler.options import OptionError
from sidestream.graphs.config_fields import ConfigError
from sidestream.runtime.api.sampling_defaults import SamplingDefaults
from sidestream.runtime.text.generation_config import describe, eos_token_ids, sampling_defaults
from support.pieces import sentencepiece_model
from support.tiny import TinyBase, tiny_llama, write_tokenizer
from transformers import AutoTokenizer, GenerationConfig

SMALL: dict[str, Any] = {
    "device": "cpu", "precision": "fp32", "max_model_len": 64, "max_num_seqs": 4, "num_kv_pages": 8,
    "show_progress": False,
}  # fmt: skip
PROMPT = [5, 6, 7]


def write(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(fields))


TOKENIZERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "text": ({"eos_token": "</s>"}, None),
    "special token": ({"eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}}, None),
    "an ordinary token": ({"eos_token": "A"}, None),
    "special_tokens_map.json": ({}, {"eos_token": {"content": "<s>"}}),
    "both files": ({"eos_token": "</s>"}, {"eos_token": "<s>"}),
    "a file that is replaced": (
        {"eos_token": "</s>", "added_tokens_decoder": {"256": {"content": "<s>"}, "257": {"content": "</s>"}}},
        {"eos_token": "<s>"},
    ),
    "none": ({}, None),
    "null": ({"eos_token": None}, None),
    "added_tokens_decoder": (
        {"eos_token": "</s>", "added_tokens_decoder": {"257": {"content": "</s>", "special": True}}},
        None,
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokenizers_eos_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path)
    config, special = TOKENIZERS[name]
    write(tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **config)
    if special is not None:
        write(tmp_path / "special_tokens_map.json", **special)
    theirs = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert eos_token_ids(tmp_path) == ({theirs} if theirs is not None else set())


@pytest.mark.parametrize("config", [{}, {"eos_token": "</s>"}, {"eos_token": "q"}])
def test_it_may_be_a_tokenizer_model(tmp_path: Path, config: dict[str, Any]) -> None:
    sentencepiece_model(tmp_path, ["The quick brown fox jumps over the lazy dog."] * 99)
    write(tmp_path / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", **config)
    assert eos_token_ids(tmp_path) == {AutoTokenizer.from_pretrained(tmp_path).eos_token_id}


def test_every_file_counts(tmp_path: Path) -> None:
    assert eos_token_ids(None) == frozenset()
    write(tmp_path / "config.json", eos_token_id=2)
    assert eos_token_ids(tmp_path) == {2}
    write(tmp_path / "generation_config.json", eos_token_id=[128001, 128009, True, "x", -1])
    assert eos_token_ids(tmp_path) == {2, 128001, 128009}
    write_tokenizer(tmp_path)
    assert eos_token_ids(tmp_path) == eos_token_ids(tmp_path, "vllm") == {2, 257, 128001, 128009}
    other = tmp_path / "other"
    other.mkdir()
    write(other / "generation_config.json", eos_token_id=9)
    assert eos_token_ids(tmp_path, other) == {2, 257, 9}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config.json is not valid JSON"):
        eos_token_ids(tmp_path)


def test_defaults_are_the_files(tmp_path: Path) -> None:
    assert sampling_defaults(None) == sampling_defaults(tmp_path) == SamplingDefaults()
    saved = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05, max_new_tokens=77
    )
    saved.save_pretrained(tmp_path)
    found = sampling_defaults(tmp_path)
    assert found.given().pop("max_tokens") == saved.max_new_tokens
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        assert getattr(found, name) == getattr(saved, name)
    write(tmp_path / "generation_config.json", do_sample=False, temperature=0.6, top_k=None, eos_token_id=3)
    assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6), "vLLM does not ask for do_sample"
    assert "temperature 0.6" in describe(sampling_defaults(tmp_path)) and describe(SamplingDefaults()) == ""
    assert sampling_defaults(tmp_path, "vllm") == SamplingDefaults()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"other/generation_config.json does not exist.*'auto' or 'vllm'"):
        sampling_defaults(tmp_path, other)
    write(other / "generation_config.json", max_new_tokens=5, temperature=0)
    assert sampling_defaults(tmp_path, str(other)) == SamplingDefaults(max_tokens=5, temperature=0)
    for damaged in ("{", "[]", '"x"'):
        (tmp_path / "generation_config.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            sampling_defaults(tmp_path)


def test_an_override_replaces_single_values(base: TinyBase, capfd: pytest.CaptureFixture[str]) -> None:
    override = {"temperature": 0, "top_k": None, "max_new_tokens": 3}
    with LLM(base.path, override_generation_config=override, **{**SMALL, "show_progress": True}) as llm:
        assert "the sampling defaults are temperature 0, max_new_tokens 3 (" in capfd.readouterr().err
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
    assert sampling_defaults(base.path, "vllm", {"top_p": 0.5}) == SamplingDefaults(top_p=0.5)
    for wrong, reason in (
        ({"do_sample": False}, "'do_sample' is no sampling default; they are temperature, top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be"),
        ('{"top_k": 1}', "must be a mapping such as"),
    ):
        with pytest.raises(OptionError, match=reason):
            LLM(base.path, override_generation_config=wrong, **SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"), ("temperature", -0.5), ("temperature", float("nan")), ("temperature", True),
        ("temperature", [1]), ("top_p", 0), ("top_p", 1.5), ("top_k", 2.5), ("top_k", -2), ("min_p", float("inf")),
        ("repetition_penalty", 0), ("max_new_tokens", 0), ("max_new_tokens", "9"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_left_out_and_named(
    tmp_path: Path, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "generation_config.json", **{"top_k": 7, "min_p": 0.1, name: value})
    with caplog.at_level(logging.WARNING):
        found = sampling_defaults(tmp_path)
    expected = {"top_k": 7, "min_p": 0.1}
    expected.pop(name, None)
    assert found.given() == expected
    (record,) = caplog.records
    assert f"generation_config.json: {name}={value!r} must be" in record.getMessage()
    assert record.getMessage().endswith("the value is ignored")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    made = tiny_llama(tmp_path_factory.mktemp("defaults"), num_hidden_layers=1, tokenizer=True, eos_token_id=300)
    config = json.loads((made.path / "tokenizer_config.json").read_text()) | {"eos_token": "Q"}
    write(made.path / "tokenizer_config.json", **config)
    write(made.path / "generation_config.json", eos_token_id=[301], top_k=1, max_new_tokens=5, do_sample=True)
    return made


def test_prompts_without_parameters_have_the_models(base: TinyBase, capfd: pytest.CaptureFixture[str]) -> None:
    """`max_new_tokens` and `top_k=1` show; parameters that are given are used as they are."""
    with LLM(base.path, **{**SMALL, "show_progress": True}) as llm:
        assert "top_k 1, max_new_tokens 5" in capfd.readouterr().err
        assert llm.get_default_sampling_params() == SamplingParams(top_k=1, max_tokens=5)
        drawn = llm.generate([PROMPT] * 3, use_tqdm=False)
        greedy = llm.generate([PROMPT] * 3, SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
        assert [each.outputs[0].token_ids for each in drawn] == [each.outputs[0].token_ids for each in greedy]
        (mixed, own) = llm.generate([PROMPT] * 2, [None, SamplingParams(ignore_eos=True)], use_tqdm=False)  # type: ignore[list-item]
        assert mixed.outputs[0].token_ids == greedy[0].outputs[0].token_ids and len(own.outputs[0].token_ids) == 16
        streamed = [token for chunk in llm.stream(PROMPT) for token in chunk.token_ids]
        assert streamed == greedy[0].outputs[0].token_ids
    with LLM(base.path, generation_config="vllm", **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        first, second = llm.generate([PROMPT] * 2, use_tqdm=False)
        assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_each_kind_of_eos_ends_an_answer(base: TinyBase) -> None:
    """The tokenizer's (Q is 81), config.json's and generation_config.json's; with what requests say about them."""
    with LLM(base.path, **SMALL) as llm:

        def answer(token: int, **fields: Any) -> tuple[list[int], str | None, int | str | None]:
            params = SamplingParams(temperature=0, max_tokens=3, logit_bias={token: 100}, **fields)
            output = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
            return output.token_ids, output.finish_reason, output.stop_reason

        for token in (81, 300, 301):
            assert answer(token) == ([token], "stop", None)
            assert answer(token, ignore_eos=True) == ([token] * 3, "length", None)
            assert answer(token, ignore_eos=True, stop_token_ids=[token]) == ([token], "stop", token)
            tokens, reason, _ = answer(token, min_tokens=2)
            assert token not in tokens[:2] and tokens[2:] == [token] and reason == "stop"
        assert answer(302)[1] == "length"


@pytest.mark.parametrize("wrong", [5, None, ["auto"]])
def test_the_option_is_checked_before_any_work(base: TinyBase, wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation_config=.* must be 'auto', 'vllm' or a directory"):
        LLM(base.path, generation_config=wrong, **SMALL)
    with pytest.raises(ConfigError, match=r"generation_config\.json does not exist"):
        LLM(base.path, generation_config=str(tmp_path), **SMALL)


def test_a_request_that_contradicts_them_names_both(base: TinyBase) -> None:
    with LLM(base.path, **SMALL) as llm, pytest.raises(RequestError, match="min_tokens=9 exceeds max_tokens=5"):
        llm.generate([PROMPT], SamplingParams(min_tokens=9, max_tokens=5), use_tqdm=False)
