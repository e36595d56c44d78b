"""Both front doors against transformers and peft: what goes through the passes gives the same logits."""

from pathlib import Path

import pytest
import sidestream
import torch
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.compiler.pipeline import ALWAYS_ON, pass_names
from support.compiled import CompiledRunner
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import LLAMA3_ROPE, AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_llama
from torch.nn.functional import kl_div, log_softmax

TOLERANCE = 1e-4
ATTENTION = ("q_proj", "v_proj")
SEQUENCES = [[3, 14, 15, 92, 65, 35, 89, 79], [2, 71, 82, 81, 8], [1, 61, 80, 33, 98, 87, 49]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("base"), num_hidden_layers=1, rope_parameters=LLAMA3_ROPE)


@pytest.fixture(scope="module")
def adapters(base: TinyBase) -> list[Path]:
    return tiny_adapters(base, [AdapterSpec(rank=4, targets=ATTENTION), AdapterSpec(rank=24, use_rslora=True)])


def steps(runner: PagedRunner) -> list[torch.Tensor]:
    """Three sequences (adapter 0, none, adapter 1): chunked prefill, then decode steps in one batch."""
    slots = (0, -1, 1)
    parts: list[list[torch.Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for sizes in ((4, 3, 5), (3, 1, 1), (1, 1, 1)):
        chunks = [Chunk(i, SEQUENCES[i][done[i] : done[i] + size], slots[i]) for i, size in enumerate(sizes)]
        for i, logits in enumerate(runner.step(chunks)):
            parts[i].append(logits)
            done[i] += sizes[i]
    return [torch.cat(part) for part in parts]


def expected(base: TinyBase, adapters: list[Path]) -> list[torch.Tensor]:
    return [
        oracle_logits(base, adapter, tokens)
        for adapter, tokens in zip((adapters[0], None, adapters[1]), SEQUENCES, strict=True)
    ]


def divergence(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Mean KL of the predicted distributions."""
    return float(
        kl_div(
            log_softmax(torch.cat(got), -1), log_softmax(torch.cat(want), -1), log_target=True, reduction="batchmean"
        )
    )


def test_fp32_logits_equal_transformers_and_peft(base: TinyBase, adapters: list[Path]) -> None:
    model, _ = plain_model(base, adapters)
    runner = CompiledRunner(model, CompileOptions(precision="fp32"), 3, padding=2)
    for got, want in zip(steps(runner), expected(base, adapters), strict=True):
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [name for name in pass_names() if name not in ALWAYS_ON])
def test_each_pass_can_be_switched_off(base: TinyBase, adapters: list[Path], name: str) -> None:
    """Numerics in fp32 don't depend on any pass; in fp8 the counts that remain are still what the model implies."""
    model, _ = plain_model(base, adapters)
    got = steps(CompiledRunner(model, CompileOptions(precision="fp32", disable=(name,)), 3))
    for logits, want in zip(got, expected(base, adapters), strict=True):
        torch.testing.assert_close(logits, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("options", [
    {"precision": "bf16"},
    {"precision": "fp8"},
    {"precision": "fp8", "hadamard": False},
    {"precision": "fp8", "kv_dtype": "int8"},
    {"precision": "fp8", "kv_dtype": "bf16"},
    {"precision": "fp8", "lm_head": "bf16"},
    {"precision": "fp8", "lora_lowering": "serial"},
], ids=lambda options: "-".join(f"{value}" for value in options.values()))  # fmt: skip
def test_reduced_precision_stays_near(base: TinyBase, adapters: list[Path], options: dict[str, object]) -> None:
    """bf16 rounds each activation once; fp8 adds 2 ** -4 relative noise on weights and activations.

    The logits' standard deviation is about 1.
    """
    model, _ = plain_model(base, adapters, torch.bfloat16)
    got, want = steps(CompiledRunner(model, CompileOptions(**options), 3)), expected(base, adapters)  # type: ignore[arg-type]
    kl = divergence(got, want)
    assert kl < (2e-3 if options["precision"] == "bf16" else 2e-2), f"mean KL {kl}"
    assert kl > 1e-9, "nothing was rounded, so this option did nothing"


@pytest.mark.parametrize(
    "name", ["quantize_kv", "fuse_rope_append", "fuse_quantize", "pack_projections", "fuse_add_rms_norm", "lift_lora"]
)
def test_passes_off_in_fp8_stay_near(base: TinyBase, adapters: list[Path], name: str) -> None:
    model, _ = plain_model(base, adapters, torch.bfloat16)
    got = steps(CompiledRunner(model, CompileOptions(precision="fp8", disable=(name,)), 3))
    assert divergence(got, expected(base, adapters)) < 2e-2


def test_torch_compile_on_transformers_and_peft(base: TinyBase, adapters: list[Path]) -> None:
    module = base.adapted(adapters[1])
    compiled = torch.compile(module, backend="sidestream")
    with torch.no_grad():
        for length in (8, 5, 3):  # a second shape makes Dynamo go symbolic
            ids = (
                torch.tensor([SEQUENCES[0][:length], SEQUENCES[2][1 : length + 1]])[:, :length]
                if length < 7
                else torch.tensor([SEQUENCES[0]])
            )
            want = module(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, want, atol=TOLERANCE, rtol=0)
    torch._dynamo.reset()


def test_torch_compile_follows_changed_weights(base: TinyBase) -> None:
    module = tiny_llama(base.path.parent / "changed", num_hidden_layers=1).model
    compiled = torch.compile(module, backend="sidestream")
    ids = torch.tensor([SEQUENCES[0]])
    with torch.no_grad():
        before = compiled(input_ids=ids, use_cache=False).logits
        module.lm_head.weight.mul_(2)
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, 2 * before, atol=TOLERANCE, rtol=0)
    torch._dynamo.reset()


def test_torch_compile_takes_options_by_name(base: TinyBase) -> None:
    ids = torch.tensor([SEQUENCES[0]])
    with torch.no_grad():
        want = base.model(input_ids=ids, use_cache=False).logits
        got = torch.compile(base.model, backend="sidestream", options={"precision": "fp8"})(
            input_ids=ids, use_cache=False
        ).logits
        assert 1e-9 < divergence([got[0]], [want[0]]) < 2e-2
        torch._dynamo.reset()
        with pytest.raises(Exception, match="colour"):
            torch.compile(base.model, backend="sidestream", options={"colour": "blue"})(input_ids=ids, use_cache=False)
    torch._dynamo.reset()


def test_sidestream_compile_on_transformers_and_peft(base: TinyBase, adapters: list[Path]) -> None:
    """A foreign module keeps its own signature and result type."""
    module = base.adapted(adapters[0])
    ids = torch.tensor([SEQUENCES[0], SEQUENCES[0][::-1]])
    compiled = sidestream.compile(
        module, CompileOptions(precision="fp32"), example_inputs={"input_ids": ids, "use_cache": False}
    )
    with torch.no_grad():
        want = module(input_ids=ids, use_cache=False)
    result = compiled(input_ids=ids, use_cache=False)
    assert type(result) is type(want)
    torch.testing.assert_close(result.logits, want.logits, atol=TOLERANCE, rtol=0)
    matches = {record.name: record.matches for record in compiled.records}
    assert matches["lift_lora"] == 2 and matches["lift_rms_norm"] == 3 and matches["lift_rope"] == 2
    with pytest.raises(TypeError, match="input_ids"):
        compiled(tokens=ids)


def test_unknown_passes_and_contradictions_are_refused(base: TinyBase) -> None:
    model, _ = plain_model(base)
    with pytest.raises(OptionError, match="fuse_everything"):
        sidestream.compile(model, CompileOptions(disable=("fuse_everything",)))
    with pytest.raises(OptionError, match="normalize"):
        sidestream.compile(model, CompileOptions(disable=("normalize",)))
    with pytest.raises(OptionError, match="contradicts"):
        CompileOptions(precision="bf16", kv_dtype="int8")
    with pytest.raises(TypeError, match="example_inputs"):
        sidestream.compile(torch.nn.Linear(2, 2))
