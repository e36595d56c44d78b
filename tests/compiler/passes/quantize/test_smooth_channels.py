"""Channels after norms and SiLU * mul divided by powers of two: nothing changes in 16 bits, and an outlier costs int8
nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.compiler.passes.quantize.smooth_channels import channel_exponents_name
from sidestream.graphs.checkpoint import Checkpoint
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from sidestream.runtime.quantization.calibration import (
    KV_DTYPES,
    TREATMENTS,
    Calibration,
    CalibrationError,
    LayerStatistics,
    fingerprint,
)
from support.compiled import CompiledRunner
from support.paged import Chunk, plain_model
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

CHUNKS = [Chunk(0, list(range(3, 33)), -1), Chunk(1, [7, 200, 31, 99, 4], 0), Chunk(2, list(range(150, 130, -1)), 1)]
SPECS = [AdapterSpec(rank=4), AdapterSpec(rank=20, targets=("q_proj", "v_proj", "up_proj", "o_proj"))]
UNQUANTIZED: dict[str, Any] = {
    "precision": "int8",
    "kv_dtype": "bf16",
    "lora_dtype": "bf16",
    "disable": ("quantize_linears",),
}


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def base(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("smooth"), tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def adapters(base: TinyBase) -> list[Path]:
    return tiny_adapters(base, SPECS)


def calibration_of(base: TinyBase) -> Calibration:
    """One that measured nothing."""
    config = LlamaConfig.from_directory(base.path)
    keys = {(dtype, *each): 0.0 for dtype in KV_DTYPES for each in TREATMENTS}
    figures = LayerStatistics(keys, {(dtype, rotated): 0.0 for dtype in KV_DTYPES for rotated in (False, True)})
    centers = [torch.zeros(config.num_key_value_heads, config.head_dim) for _ in range(config.num_hidden_layers)]
    return Calibration(fingerprint(config, Checkpoint(base.path)), [figures] * len(centers), centers)


def smoothed_modules(model: Llama) -> dict[str, Any]:
    """Norms, and what reads SiLU * mul."""
    return {name: module for name, module in model.named_modules() if name.endswith(("norm", "down_proj"))}


def give_exponents(model: Llama) -> dict[str, torch.Tensor]:
    """Constants where a calibration would put them."""
    torch.manual_seed(0)
    chosen = {}
    for name, module in smoothed_modules(model).items():
        chosen[name] = torch.randint(-4, 5, module.weight.shape[-1:], dtype=torch.int8)
        module.register_buffer("channel_exponents", chosen[name])
    return chosen


def change(module: Any, factors: torch.Tensor, rows: bool) -> None:
    """A projection's rows, or its columns, times `factors`, its adapters' with them."""
    kept = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in kept.items():
        if name == "weight" or name == ("lora_b" if rows else "lora_a"):
            tensor.mul_(factors[:, None] if rows else factors)


def logits(model: Llama, **options: Any) -> torch.Tensor:
    return torch.cat(CompiledRunner(model, CompileOptions(**options), 3, fill=0.0).step(CHUNKS))


def test_sixteen_bits_are_the_same_to_the_last_bit(base: TinyBase, adapters: list[Path]) -> None:
    model, _ = plain_model(base, adapters, dtype=torch.bfloat16)
    give_exponents(model)
    assert torch.equal(logits(model, **UNQUANTIZED, smooth_channels=True), logits(model, **UNQUANTIZED))


def test_outliers_are_undone_to_the_last_bit(base: TinyBase, adapters: list[Path]) -> None:
    """Channels made larger by powers of two, and the columns that read them smaller: smoothed by the same powers, int8
    answers as it does without them."""
    model, _ = plain_model(base, adapters, dtype=torch.bfloat16)
    plain = logits(model, precision="int8")
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        "down_proj": ("down_proj",),
    }
    for name, exponents in give_exponents(model).items():
        if name == "model.norm":
            model.model.norm.channel_exponents.zero_()  # type: ignore[operator]  # a tied head's columns are the embedding's
            continue
        factors = torch.exp2(exponents.float()).bfloat16()
        owner, _, leaf = name.rpartition(".")
        with torch.no_grad():
            if leaf == "down_proj":
                change(model.get_submodule(f"{owner}.up_proj"), factors, rows=True)
            else:
                model.get_submodule(name).weight.mul_(factors)  # type: ignore[operator]
            for reader in readers[leaf]:
                change(model.get_submodule(owner).get_submodule(reader), 1 / factors, rows=False)
    massive = logits(model, precision="int8")
    assert torch.equal(logits(model, precision="int8", smooth_channels=True), plain)
    assert (massive - plain).norm() > 0.01 * plain.norm()


def test_every_norm_and_mlp_is_counted_and_the_pass_has_a_name(base: TinyBase, adapters: list[Path]) -> None:
    model, _ = plain_model(base, adapters)

    def matches(**options: Any) -> int:
        compiled = sidestream.compile(model, CompileOptions(**options), text=False)
        return sum(each.matches for each in compiled.records if each.name == "smooth_channels")

    assert matches(smooth_channels=True) == 7 and matches(smooth_channels=True, lm_head="bf16") == 6
    assert matches() == matches(precision="fp8", smooth_channels=True) == 0
    assert matches(smooth_channels=True, disable=("smooth_channels",)) == 0


def test_products_that_are_read_in_another_way_are_left_with_the_reason(base: TinyBase, adapters: list[Path]) -> None:
    model, _ = plain_model(base, adapters)
    options = CompileOptions(smooth_channels=True, disable=("lift_lora",), check_counts=False)
    (record,) = (
        each for each in sidestream.compile(model, options, text=False).records if each.name == "smooth_channels"
    )
    left = [reason for reason in record.rejected if reason.startswith("mul")]
    assert len(left) == 2 and all("is lift_lora" in reason or "nodes" in reason for reason in left), record.rejected


def test_an_engine_packs_adapters_by_its_calibration(base: TinyBase, adapters: list[Path], tmp_path: Path) -> None:
    plain = calibration_of(base)
    model, _ = plain_model(base)
    exponents = {channel_exponents_name(f"{name}.weight"): each for name, each in give_exponents(model).items()}
    smoothed = replace(plain, channel_exponents=exponents)
    smoothed.save(tmp_path / "file")
    of_norms = {name: each for name, each in exponents.items() if "down_proj" not in name}  # as an earlier release has
    assert 0 < len(of_norms) < len(exponents)
    replace(plain, channel_exponents=of_norms).save(tmp_path / "earlier")
    answers = []
    for calibration in (plain, tmp_path / "file", tmp_path / "earlier"):
        named = {str(number): path for number, path in enumerate(adapters)}
        options = {"kv_dtype": "bf16", "lora_dtype": "bf16", "disable_passes": ("quantize_linears",)}
        llm = LLM(
            base.path, named, calibration=calibration, device="cpu", show_progress=False, max_num_seqs=2, **options
        )
        assert llm.compiled.options.smooth_channels == (calibration is not plain)
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, ignore_eos=True)
        prompts = [list(range(5, 25))] * 3
        out = llm.generate(prompts, params, adapter=[None, "0", "1"])
        answers.append([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in out])
    assert answers[0] == answers[1] == answers[2]
    assert [str(answer) for answer in answers[0][:1]] != [str(answer) for answer in answers[0][1:2]]
    with pytest.raises(OptionError, match="measured the norms"):
        LLM(base.path, calibration=plain, smooth_channels=True, device="cpu", show_progress=False)


def test_exponents_of_another_shape_or_size_are_refused(base: TinyBase, tmp_path: Path) -> None:
    name = channel_exponents_name("model.norm.weight")
    for values, said in (
        (torch.zeros(7, dtype=torch.int8), "7 channels"),
        (torch.full((128,), 99).char(), "at most 8"),
    ):
        replace(calibration_of(base), channel_exponents={name: values}).save(tmp_path / "file")
        with pytest.raises(CalibrationError, match=said):
            LLM(base.path, calibration=tmp_path / "file", device="cpu", show_progress=False)
