"""The plain module: names, shapes and what torch.export sees of it."""

import collections
import dataclasses

import pytest
import torch
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import INV_FREQ, Llama
from sidestream.graphs.lora import LoraShape
from support.lora import stack_shapes

CONFIG = LlamaConfig(320, 128, 256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


def capture(model: Llama) -> torch.export.ExportedProgram:
    return torch.export.export(
        model, (), model.example_inputs(24, 6, 16, 4), strict=False, dynamic_shapes=model.dynamic_shapes()
    )


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_named_as_in_hugging_face_checkpoints(tied: bool) -> None:
    from transformers import LlamaConfig as HFLlamaConfig
    from transformers import LlamaForCausalLM

    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    with torch.device("meta"):
        theirs = LlamaForCausalLM(
            HFLlamaConfig(
                vocab_size=320,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                tie_word_embeddings=tied,
            )
        )
    assert Llama(config, device="meta").checkpoint_tensors() == {
        name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()
    }


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("lora", [None, LoraShape(3, 16)])
def test_capture_keeps_plain_aten_our_two_ops_and_symbolic_sizes(device: str, lora: LoraShape | None) -> None:
    program = capture(Llama(CONFIG, lora, torch.bfloat16, device))
    calls = collections.Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")
    layers, projections = CONFIG.num_hidden_layers, 7
    assert calls["sidestream.append_kv.default"] == calls["sidestream.paged_attention.default"] == layers
    assert calls["aten.linear.default"] == layers * projections + 1
    assert calls["aten.bmm.default"] == (2 * layers * projections if lora else 0)
    assert calls["aten.rsqrt.default"] == 2 * layers + 1
    assert len(program.range_constraints) >= 4  # tokens, sequences, pages and blocks, all apart
    logits = next(node for node in program.graph.nodes if node.op == "output").args[0][0].meta["val"]
    assert logits.dtype == torch.bfloat16
    assert isinstance(logits.shape[0], torch.SymInt)
    assert logits.shape[1] == 320


def test_captured_names_lead_back_to_the_module() -> None:
    lora = LoraShape(3, 16)
    model = Llama(CONFIG, lora, torch.bfloat16, "meta")
    targets = {spec.target for spec in capture(model).graph_signature.input_specs if spec.target}
    assert targets == {*model.checkpoint_tensors(), *stack_shapes(model), *model.derived_tensors()}


def test_derived_tensors_are_real_on_a_meta_model() -> None:
    model = Llama(CONFIG, device="meta")
    assert model.model.rotary_emb.inv_freq.device.type == "meta"
    ((name, value),) = model.derived_tensors().items()
    assert name == INV_FREQ
    torch.testing.assert_close(value, Llama(CONFIG).model.rotary_emb.inv_freq)


def test_the_checkpoints_dtype_is_the_default() -> None:
    assert Llama(dataclasses.replace(CONFIG, dtype="float32"), device="meta").dtype == torch.float32
    assert Llama(CONFIG, dtype=torch.float32, device="meta").lm_head.weight.dtype == torch.float32


def test_packed_targets_come_together() -> None:
    assert LoraShape(1, 16, ("v_proj", "up_proj")).targets == ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert LoraShape(1, 16, ("down_proj", "o_proj")).targets == ("o_proj", "down_proj")
    model = Llama(CONFIG, LoraShape(5, 32, ("k_proj",)), device="meta")
    stacks = stack_shapes(model)
    assert len(stacks) == 2 * 3 * 2
    assert stacks["model.layers.1.self_attn.k_proj.lora_a"] == (5, 32, 128)
    assert stacks["model.layers.1.self_attn.k_proj.lora_b"] == (5, 128, 32)


@pytest.mark.parametrize(
    ("shape", "named"),
    [((0, 16), "slots"), ((1, 8), "multiple of 16"), ((1, 0), "rank"), ((1, 16, ("norm",)), "norm")],
)
def test_impossible_stacks(shape: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LoraShape(*shape)
