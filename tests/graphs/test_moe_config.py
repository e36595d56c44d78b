"""config.json of real mixtures of experts, and what is refused of them and of others."""

from pathlib import Path
from typing import Any

import pytest
from sidestream.graphs.config import ConfigError, LlamaConfig

QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "router_jitter_noise": 0.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
GRANITE_3B: dict[str, Any] = {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_size": 1536,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "model_type": "granitemoe",
    "num_attention_heads": 24,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 40,
    "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}


def sparse_layers(fields: dict[str, Any]) -> list[int]:
    config = LlamaConfig.from_dict(fields)
    return [layer for layer in range(config.num_hidden_layers) if config.is_sparse(layer)]


def test_three_families_as_they_are_published() -> None:
    qwen, mixtral, granite = map(LlamaConfig.from_dict, (QWEN3_30B, MIXTRAL_8X7B, GRANITE_3B))
    for config, experts in ((qwen, (128, 8, 768)), (mixtral, (8, 2, 14336)), (granite, (40, 8, 512))):
        assert (config.num_experts, config.num_experts_per_tok, config.expert_intermediate_size) == experts
        assert config.norm_topk_prob and config.dense_layers == () and config.sliding_window is None
    assert qwen.head_norms and qwen.biases == () and not mixtral.head_norms
    assert (mixtral.rope_theta, mixtral.num_key_value_heads, mixtral.rms_norm_eps) == (1e6, 8, 1e-5)
    assert mixtral.max_position_embeddings == 131072
    assert (granite.attention_multiplier, granite.logits_scaling, granite.head_dim) == (0.015625, 6.0, 64)
    assert (granite.embedding_multiplier, granite.residual_multiplier) == (12.0, 0.22)


def test_missing_fields_have_the_values_of_transformers() -> None:
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "num_key_value_heads")
    config = LlamaConfig.from_dict({name: value for name, value in QWEN3_30B.items() if name not in names})
    assert (config.num_experts, config.num_experts_per_tok, config.expert_intermediate_size) == (128, 8, 768)
    assert not config.norm_topk_prob and config.num_key_value_heads == 4
    fields = {name: value for name, value in QWEN3_30B.items() if name != "num_experts"}
    assert LlamaConfig.from_dict({**fields, "num_local_experts": 64}).num_experts == 64, "as transformers 5 writes it"
    window = {**QWEN3_30B, "use_sliding_window": True, "sliding_window": 512}
    assert LlamaConfig.from_dict(window).window_of(3) == 512 and LlamaConfig.from_dict(window).full_layers == ()


def test_dense_layers_are_those_of_transformers() -> None:
    qwen = {**QWEN3_30B, "num_hidden_layers": 6}
    assert sparse_layers(qwen) == list(range(6))
    assert sparse_layers({**qwen, "mlp_only_layers": [0, 5]}) == [1, 2, 3, 4]
    assert sparse_layers({**qwen, "decoder_sparse_step": 2}) == [1, 3, 5]
    assert sparse_layers({**qwen, "decoder_sparse_step": 2, "mlp_only_layers": [3]}) == [1, 5]
    config = LlamaConfig.from_dict({**qwen, "mlp_only_layers": [0]})
    assert [name for name in config.linear_modules() if "mlp" in name] == [
        f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    assert config.module_shape("model.layers.0.mlp.gate_proj") == (6144, 2048)
    assert config.module_shape("model.layers.1.mlp.experts.7.gate_proj") == (768, 2048)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
REFUSED = [
    ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 is above the number of experts 128"),
    ({"num_local_experts": 64}, "num_experts and num_local_experts differ ([64, 128])"),
    ({"num_experts": 0}, "num_experts must be a positive integer"),
    ({"moe_intermediate_size": 776}, "moe_intermediate_size 776"),
    ({"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
    ({"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"n_group": 8}, "n_group 8"),
    ({"topk_group": 4}, "topk_group 4"),
    ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    ({"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5"),
    ({"moe_num_shared": 1}, "moe_num_shared 1"),
    ({"n_shared_experts": 1}, "n_shared_experts 1"),
    ({"shared_expert_intermediate_size": 5632}, "shared_expert_intermediate_size 5632"),
    ({"shared_intermediate_size": 1024}, "shared_intermediate_size 1024"),
    ({"quantization_config": BLOCKS}, "'fp8' (one scale for each block of [128, 128])"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4'"),
    ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, "shared expert"),
    ({"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}, "shared expert"),
    ({"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"}, "recurrent state"),
    ({"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe"}, "recurrent state"),
    ({"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}, "all heads of q and k"),
    ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, "stored in mxfp4"),
    ({"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe"}, "sparse mixing"),
    ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, "MLA"),
    ({"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}, "sigmoid scores"),
    ({"architectures": ["FooMoeForCausalLM"], "model_type": "foo_moe"}, "another kind"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_refused_by_name_and_with_a_remedy(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LlamaConfig.from_dict({**QWEN3_30B, **change})
    assert named in str(caught.value)
    assert ": " in str(caught.value)  # what, then what to do


def test_a_width_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(ConfigError, match=r"^intermediate_size 14340 is not supported"):
        LlamaConfig.from_dict({**MIXTRAL_8X7B, "intermediate_size": 14340})
    neutral = {"n_group": 1, "scoring_func": "softmax", "moe_num_shared": 0, "shared_expert_intermediate_size": None}
    assert LlamaConfig.from_dict({**MIXTRAL_8X7B, **neutral}) == LlamaConfig.from_dict(MIXTRAL_8X7B)


def test_figures_of_the_page() -> None:
    configs = [LlamaConfig.from_dict(fields) for fields in (QWEN3_30B, MIXTRAL_8X7B, GRANITE_3B)]
    experts, cache, slot = [], [], []
    for config in configs:
        every, layers = config.num_experts * config.num_hidden_layers, config.num_hidden_layers
        hidden, inner = config.hidden_size, config.expert_intermediate_size
        experts.append(f"{every * 3 * hidden * inner / 1e9:.1f} GB")
        cache.append(f"{layers * 2 * config.num_key_value_heads * config.head_dim / 1e3:.0f} kB")
        slot.append(f"{every * 16 * 3 * (hidden + inner) / 1e6:.0f} MB")
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    chosen = [f"{config.num_experts}, {config.num_experts_per_tok}" for config in configs]
    for row in (chosen, experts, cache, slot):
        assert f"| {' | '.join(row)} |" in page
