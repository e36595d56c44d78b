"""config.json of real Llamas in both of transformers' spellings, and the refusals."""

import json
from pathlib import Path

import pytest
import torch
from sidestream.graphs.config import ConfigError, LlamaConfig, RopeScaling
from sidestream.graphs.rotary import inverse_frequencies
from support.tiny import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_8B = {
    **LLAMA_2_7B,
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_31_8B = {
    **LLAMA_3_8B,
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
LLAMA_32_1B = {
    **LLAMA_31_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def transformers_5(fields: dict) -> dict:
    """The same config as transformers 5 spells it."""
    moved = {key: value for key, value in fields.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    rope = {"rope_type": "default", "rope_theta": fields.get("rope_theta", 10000.0), **(fields["rope_scaling"] or {})}
    return {**moved, "dtype": fields["torch_dtype"], "rope_parameters": rope}


@pytest.mark.parametrize("spell", [dict, transformers_5])
@pytest.mark.parametrize(
    ("fields", "head_dim", "kv_heads", "theta", "kind", "factor", "tied", "eos"),
    [
        (LLAMA_2_7B, 128, 32, 10000.0, "default", 1.0, False, (2,)),
        (LLAMA_3_8B, 128, 8, 500000.0, "default", 1.0, False, (128001,)),
        (LLAMA_31_8B, 128, 8, 500000.0, "llama3", 8.0, False, (128001, 128008, 128009)),
        (LLAMA_32_1B, 64, 8, 500000.0, "llama3", 32.0, True, (128001, 128008, 128009)),
    ],
)
def test_every_llama_in_both_spellings(spell, fields, head_dim, kv_heads, theta, kind, factor, tied, eos) -> None:
    config = LlamaConfig.from_dict(spell(fields))
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta, config.tie_word_embeddings) == (
        head_dim,
        kv_heads,
        theta,
        tied,
    )
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == (kind, factor)
    assert config.eos_token_ids == eos
    assert config.dtype == fields["torch_dtype"]


def test_the_old_linear_spelling() -> None:
    config = LlamaConfig.from_dict({**LLAMA_2_7B, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert config.rope_scaling == RopeScaling("linear", factor=4.0)
    assert config.rope_theta == 10000.0


def test_what_calibrations_know_a_model_by_stays() -> None:
    """A file that an earlier release wrote has a digest of this text."""
    assert repr(RopeScaling("linear", factor=4.0)) == (
        "RopeScaling(kind='linear', factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, "
        "original_max_position_embeddings=8192)"
    )


def test_yarn_lengthens_what_config_json_says() -> None:
    """Qwen's pages say to add it, and not to change the positions."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert LlamaConfig.from_dict({**LLAMA_2_7B, "rope_scaling": yarn}).max_position_embeddings == 16384
    longer = {**LLAMA_2_7B, "max_position_embeddings": 32768, "rope_scaling": {**yarn, "factor": None}}
    assert LlamaConfig.from_dict(longer).rope_scaling.factor == 8.0


def test_phi_3_mini_has_narrow_heads_and_two_kinds_of_contexts() -> None:
    """Its own fields, but for the factors' values."""
    fields = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32064,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.25] * 48, "long_factor": [4.0] * 48},
        "sliding_window": 262144,
    }
    for kind in ("longrope", "su"):
        config = LlamaConfig.from_dict({**fields, "rope_scaling": {**fields["rope_scaling"], "type": kind}})
        assert (config.stored_head_dim, config.head_dim, config.usual_context) == (96, 128, 4096)
        assert config.softmax_scale_of(0) == pytest.approx(
            96**-0.5 * (1 + 5 / 12)
        )  # 1 + log(131072 / 4096) / log(4096)
        assert (config.module_shape("q_proj"), config.stored_shape("q_proj")) == ((4096, 3072), (3072, 3072))
        assert config.parts_of("model.layers.0.self_attn.qkv_proj")[2][1:] == (6144, 9216)
        assert inverse_frequencies(config).count_nonzero() == 48 and inverse_frequencies(config)[0] == 1 / 1.25
        assert config.up_to(4096).rope_scaling == config.rope_scaling
        assert inverse_frequencies(config.up_to(4097))[0] == 1 / 4
    partial = LlamaConfig.from_dict(
        {**fields, "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75}
    )
    assert (partial.head_dim, partial.rotary_dim) == (128, 96)
    for wrong, named in (
        ({"partial_rotary_factor": 0.7}, "partial_rotary_factor 0.7 gives 67 of 96"),
        ({"partial_rotary_factor": 0.5}, "short_factor must hold 24"),
        ({"rope_scaling": {**fields["rope_scaling"], "long_factor": [0.0] * 48}}, "long_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 gives 144 of 96"),
        ({"rope_scaling": {**fields["rope_scaling"], "short_factor": ["a"] * 48}}, "short_factor"),
    ):
        with pytest.raises(ConfigError, match=named):
            LlamaConfig.from_dict({**fields, **wrong})


YARNS = [
    YARN_ROPE,
    {**YARN_ROPE, "beta_fast": 8, "beta_slow": 0.5, "attention_factor": 1.5},
    {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.2, "original_max_position_embeddings": 4096},
]


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 10000.0}, LINEAR_ROPE, LLAMA3_ROPE, *YARNS])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_equal_transformers(rope: dict, head_dim: int) -> None:
    from transformers import LlamaConfig as HFLlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = HFLlamaConfig(
        hidden_size=256, num_attention_heads=2, head_dim=head_dim, rope_parameters=rope, max_position_embeddings=512
    )
    ours = LlamaConfig.from_dict(json.loads(theirs.to_json_string(use_diff=False)))
    rotary = LlamaRotaryEmbedding(theirs)
    torch.testing.assert_close(inverse_frequencies(ours), rotary.inv_freq, rtol=1e-6, atol=0)
    assert ours.softmax_scale_of(0) == pytest.approx(head_dim**-0.5 * rotary.attention_scaling**2)


REFUSED = [
    ({"head_dim": 81}, "head_dim 81"),
    ({"head_dim": 256}, "head_dim 256"),
    ({"hidden_size": 4096 + 32}, "head_dim 129"),
    ({"hidden_size": 4097}, "not a multiple of num_attention_heads"),
    ({"attention_bias": "yes"}, "attention_bias"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
    ({"quantization_config": ["fp8"]}, "quant_method None"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}, "'pack-quantized'"),
    (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
            }
        },
        "num_bits of weights must be 8, not 4",
    ),
    ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, "MLA"),
    ({"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}, "images or sound"),
    ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "recurrent state"),
    ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, "serve one of LlamaForCausalLM"),
    ({"architectures": ["YoutuForCausalLM"], "model_type": "youtu", "kv_lora_rank": 512}, "latent vector (MLA)"),
    (
        {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "model_type": "paligemma",
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        "images or sound as well",
    ),
    ({"architectures": {"a": 1}, "model_type": ["x"]}, "is not supported"),
    ({"architectures": ["LlamaModel"]}, "no output head: save the model of AutoModelForCausalLM"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate=false"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": -2.0}}, "factor must be a positive number"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope's short_factor must hold 64"),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    ({"rope_scaling": {**LLAMA_31_8B["rope_scaling"], "high_freq_factor": 1.0}}, "high_freq_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
    ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ({"vocab_size": -1}, "vocab_size"),
    ({"vocab_size": 2**31}, "vocab_size"),
    ({"vocab_size": "many"}, "vocab_size"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rope_theta": 10**400}, "rope_theta"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_refused_by_name_and_with_a_remedy(change: dict, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LlamaConfig.from_dict({**LLAMA_2_7B, **change})
    assert named in str(caught.value)
    assert ": " in str(caught.value)  # what, then what to do


def test_unknown_fields_are_ignored() -> None:
    assert LlamaConfig.from_dict({**LLAMA_2_7B, "some_new_field": 3}) == LlamaConfig.from_dict(LLAMA_2_7B)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"[" * 100000, "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
    ],
    ids=["unclosed", "list", "deep", "not-utf8"],
)
def test_broken_files(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=named):
        LlamaConfig.from_directory(tmp_path)


def test_missing_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        LlamaConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (2 << 20))
    with pytest.raises(ConfigError, match="larger than"):
        LlamaConfig.from_directory(tmp_path)


MISTRAL_NEMO = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}
QWEN_25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def test_families_read_what_makes_them_differ() -> None:
    nemo, qwen = LlamaConfig.from_dict(MISTRAL_NEMO), LlamaConfig.from_dict(QWEN_25_7B)
    assert (nemo.module_shape("q_proj"), nemo.biases, nemo.sliding_window) == ((4096, 5120), (), None)
    assert (qwen.head_dim, qwen.sliding_window) == (128, None)
    assert qwen.biases == ("q_proj", "k_proj", "v_proj")
    assert LlamaConfig.from_dict({**LLAMA_2_7B, "attention_bias": True}).biases == (*qwen.biases, "o_proj")


def test_a_window_is_read_as_transformers_reads_it() -> None:
    first = {name: value for name, value in MISTRAL_NEMO.items() if name != "sliding_window"}
    assert LlamaConfig.from_dict(first).sliding_window == 4096  # where the field is missing, MistralConfig has 4096
    mistral = LlamaConfig.from_dict({**first, "max_position_embeddings": 32768})
    assert {mistral.window_of(layer) for layer in range(40)} == {4096}
    assert LlamaConfig.from_dict({**QWEN_25_7B, "use_sliding_window": True}).sliding_window == 131072


def windows(config: LlamaConfig) -> list[int]:
    return [config.window_of(layer) for layer in range(config.num_hidden_layers)]


def test_layers_with_a_window_are_those_of_transformers() -> None:
    qwen = {**QWEN_25_7B, "num_hidden_layers": 4, "sliding_window": 512}
    on = {**qwen, "use_sliding_window": True, "max_window_layers": 3}
    assert windows(LlamaConfig.from_dict(qwen)) == [0] * 4
    assert windows(LlamaConfig.from_dict(on)) == [0, 0, 0, 512]
    assert windows(LlamaConfig.from_dict({**on, "max_window_layers": 0})) == [512] * 4
    assert windows(LlamaConfig.from_dict({**on, "max_window_layers": 28})) == [0] * 4
    named = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(LlamaConfig.from_dict({**on, "layer_types": named})) == [512, 0, 0, 512]
    assert windows(LlamaConfig.from_dict({**on, "sliding_window": 32768})) == [0] * 4  # longer than any context
    for wrong in ({"layer_types": ["linear_attention"] * 4}, {"layer_types": named[:2]}, {"max_window_layers": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LlamaConfig.from_dict({**on, **wrong})


def test_contexts_within_a_window_need_none() -> None:
    config = LlamaConfig.from_dict({**QWEN_25_7B, "use_sliding_window": True, "sliding_window": 512})
    assert config.up_to(513) == config
    assert config.up_to(512).sliding_window is None
