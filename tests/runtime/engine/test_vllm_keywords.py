"""What callers of vLLM's `LLM` write is served, accepted, or refused with the remedy, as docs/coming_from.md says."""

import inspect
import re
from pathlib import Path

import pytest
from sidestream.compiler.options import OptionError
from sidestream.runtime.api.sampling_params import REFUSED, SamplingParams
from sidestream.runtime.engine.options import keywords
from sidestream.runtime.engine.vllm_keywords import ACCEPTED, UNSUPPORTED_KEYWORDS, without_vllm_keywords
from sidestream.runtime.llm import LLM
from support import vllm_names

PAGE = (Path(__file__).parents[3] / "docs" / "coming_from.md").read_text()
CALLS = {
    "LLM": (LLM, vllm_names.LLM.split()),
    "LLM.generate": (LLM.generate, vllm_names.GENERATE.split()),
    "LLM.beam_search": (LLM.beam_search, vllm_names.BEAM_SEARCH.split()),
    "LLM.chat": (LLM.chat, vllm_names.CHAT.split()),
    "SamplingParams": (SamplingParams, vllm_names.SAMPLING_PARAMS.split()),
}


def parameters(call: object) -> set[str]:
    return set(inspect.signature(call).parameters) - {"self"}  # type: ignore[arg-type]


def table() -> dict[str, tuple[set[str], set[str]]]:
    """the table of docs/coming_from.md: call -> (only in vLLM, only here)."""
    text = PAGE.partition("<!-- vllm -->")[2].partition("<!-- end -->")[0]
    rows = [line.strip("|").split("|") for line in text.strip().splitlines()[2:]]
    names = [[re.findall(r"`([^`]*)`", cell) for cell in row] for row in rows]
    return {call[0]: (set(theirs), set(ours)) for call, theirs, ours in names}


@pytest.mark.parametrize("call", CALLS)
def test_the_page_lists_every_difference(call: str) -> None:
    ours, theirs = parameters(CALLS[call][0]), set(CALLS[call][1])
    refused = set(REFUSED) if call == "SamplingParams" else set()
    assert set(table()) == set(CALLS)
    assert table()[call] == ((theirs - ours) | refused, ours - theirs)


def test_every_keyword_of_vllm_is_an_option_or_has_a_remedy() -> None:
    ours = {"model", *keywords()}
    assert not (set(UNSUPPORTED_KEYWORDS) | set(ACCEPTED)) & ours
    assert set(vllm_names.LLM.split()) - ours == set(UNSUPPORTED_KEYWORDS) | set(ACCEPTED)
    assert set(vllm_names.SAMPLING_PARAMS.split()) <= parameters(SamplingParams)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"disable_cascade_attn": True}, {"cascade_attention": False}),
        ({"kv_offloading_size": 8, "seed": None}, {"kv_host_gb": 8}),
        ({"context_length": 512, "mem_fraction_static": 0.5}, {"max_model_len": 512, "gpu_memory_utilization": 0.5}),
        (
            {"disable_radix_cache": True, "disable_cuda_graph": True},
            {"enable_prefix_caching": False, "enforce_eager": True},
        ),
        ({"page_size": 64, "pp_size": 1, "speculative_draft_model_path": "d"}, {"draft": "d"}),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}, {"speculation": 4}),
        ({"speculative_config": {"method": "eagle3", "model": "d"}}, {"speculation": "auto", "draft": "d"}),
        ({"speculative_config": None}, {}),
        ({"max_lora_ranks": 8}, {"max_lora_ranks": 8}),  # `LLM` names the closest keyword
    ],
)
def test_other_names_are_translated(given: dict[str, object], ours: dict[str, object]) -> None:
    assert without_vllm_keywords(given, adapters=False) == ours


def test_a_keyword_under_two_names_is_refused() -> None:
    with pytest.raises(OptionError, match="kv_offloading_size is kv_host_gb here, which is also given"):
        without_vllm_keywords({"kv_host_gb": 2, "kv_offloading_size": 8}, adapters=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model_path", "model_path is model here"),
        ("lora_paths", "lora_paths is adapters here"),
        ("otlp_traces_endpoint", "is a flag of `sidestream serve`: --otel-endpoint"),
    ],
)
def test_names_that_are_no_keywords_lead_to_ours(name: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        without_vllm_keywords({name: "x"}, adapters=False)


def test_speculation_is_checked() -> None:
    with pytest.raises(OptionError, match="speculative_config: its method is not supported; use speculation='auto'"):
        without_vllm_keywords({"speculative_config": {"model": "x"}}, adapters=False)
    with pytest.raises(OptionError, match="speculative_config contradicts speculation; leave it out"):
        given = {"speculation": "off", "speculative_config": {"method": "ngram"}}
        without_vllm_keywords(given, adapters=False)


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    given = {"async_scheduling": True, "attention_backend": None, "stream_interval": 2, "disable_sliding_window": False}
    assert without_vllm_keywords(given, adapters=False) == {}
    (record,) = caplog.records
    assert record.getMessage() == "without an effect here: async_scheduling=True, stream_interval=2"


def test_none_is_the_default_of_all_that_is_not_ours() -> None:
    names = [
        "kv_offloading_size",
        "otlp_traces_endpoint",
        "speculative_config",
        "quantization",
        "worker_cls",
        "model_path",
    ]
    assert without_vllm_keywords(dict.fromkeys(names), adapters=False) == {}
    assert without_vllm_keywords({"max_model_len": None, "no_option": None}, adapters=False).keys() == {
        "max_model_len",
        "no_option",
    }


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("trust_remote_code", True, "no code of a model is run"),
        ("quantization", "awq", "use precision='int8'"),
        ("tokenizer", "other/model", "put tokenizer.json"),
        ("tokenizer_mode", "slow", "put tokenizer.json"),
        ("revision", "main", "download the model first"),
        ("offload_group_size", 8, "use kv_host_gb for KV pages"),
        ("sampling_defaults", "openai", "generation_config and override_generation_config have the defaults"),
        ("worker_cls", "my.Worker", "no code of a model or plugin is run"),
        ("page_size", 16, "a KV page has 64 tokens"),
        ("swap_space", 16, "lower max_num_seqs"),
        ("cpu_offload_gb", 4, "smaller precision"),
        ("enable_lora", 1, "True or False"),
    ],
)
def test_what_is_not_there_is_refused_with_the_remedy(name: str, value: object, remedy: str) -> None:
    with pytest.raises(OptionError, match=f"{name}={re.escape(repr(value))} .*{re.escape(remedy)}"):
        LLM("no/such/model", device="cpu", **{name: value})


def test_values_that_ask_for_what_happens_anyway_are_accepted() -> None:
    defaults = {
        "trust_remote_code": False,
        "quantization": None,
        "tokenizer": None,
        "tokenizer_mode": "auto",
        "swap_space": 4.0,
        "cpu_offload_gb": 0,
        "hf_overrides": {},
        "seed": None,
    }
    assert without_vllm_keywords({**defaults, "max_model_len": 5}, adapters=False) == {"max_model_len": 5}
    with pytest.raises(OptionError, match="download the model first"):
        LLM("no/such/model", device="cpu", **defaults)
    with pytest.raises(TypeError, match="there is no option 'max_model_length'; did you mean 'max_model_len'"):
        LLM("no/such/model", max_model_length=3)


def test_enable_lora_makes_room_for_adapters_to_come() -> None:
    assert without_vllm_keywords({"enable_lora": True}, adapters=False) == {"max_loras": 1, "max_lora_rank": 16}
    given = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64}
    assert without_vllm_keywords(given, adapters=False) == {"max_loras": 4, "max_lora_rank": 64}
    assert without_vllm_keywords({"enable_lora": True}, adapters=True) == {}
    assert without_vllm_keywords({"enable_lora": False}, adapters=False) == {}
    with pytest.raises(OptionError, match="contradicts adapters"):
        without_vllm_keywords({"enable_lora": False}, adapters=True)
