"""int8 gives the logits of a bf16 model in fp16: finer, in as many bytes."""

from pathlib import Path

import pytest
import sidestream
import torch
from sidestream.compiler.options import CompileOptions
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.compiled import CompiledRunner
from support.paged import Chunk, plain_model
from support.tiny import TinyBase, tiny_llama

CHUNKS = [Chunk(0, list(range(3, 33)), -1), Chunk(1, [7, 200, 31, 99, 4], -1)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("finer"), dtype=torch.bfloat16)


def logits(base: TinyBase, **options: object) -> torch.Tensor:
    model, _ = plain_model(base, dtype=torch.bfloat16)
    torch.manual_seed(0)
    return torch.cat(CompiledRunner(model, CompileOptions(**options), 2, fill=0.0).step(CHUNKS))  # type: ignore[arg-type]


def rounded_to(dtype: torch.dtype, values: torch.Tensor) -> bool:
    return torch.equal(values, values.to(dtype).float())


def test_logits_are_those_of_bf16_rounded_less(base: TinyBase) -> None:
    fine, coarse = logits(base, precision="int8"), logits(base, precision="int8", finer_logits=False)
    assert rounded_to(torch.float16, fine) and not rounded_to(torch.bfloat16, fine)
    assert rounded_to(torch.bfloat16, coarse)
    # a step of bf16 is 1/128 of the power of two below a number; rounding loses at most half of it
    step = torch.exp2(fine.abs().log2().floor()) / 128
    assert ((fine - coarse).abs() <= 0.51 * step).all() and len(fine.unique()) > 2 * len(coarse.unique())


def test_by_name_by_option_and_in_other_modes_it_is_off(base: TinyBase) -> None:
    for options in (
        {"precision": "int8", "disable": ("finer_logits",)},
        {"precision": "int8", "lm_head": "bf16"},
        {"precision": "fp8"},
        {"precision": "bf16"},
    ):
        assert rounded_to(torch.bfloat16, logits(base, **options)), options


def test_the_report_says_what_was_left(base: TinyBase, tmp_path: Path) -> None:
    whole = tiny_llama(tmp_path)
    for directory, dtype, matches, said in (
        (base, torch.bfloat16, 1, ""),
        (whole, torch.float32, 0, "its result is torch.float32, not torch.bfloat16"),
    ):
        model, _ = plain_model(directory, dtype=dtype)
        compiled = sidestream.compile(model, CompileOptions(precision="int8"), text=False)
        record = next(each for each in compiled.records if each.name == "finer_logits")
        assert record.matches == matches and said in " ".join(record.rejected)


def test_torch_compile_keeps_its_callers_dtype() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    compiled = torch.compile(linear, backend="sidestream", options={"precision": "int8", "check_counts": False})
    assert compiled(torch.randn(4, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_an_engine_answers_and_reports_finer_log_probabilities(base: TinyBase) -> None:
    asked = [{"prompt_token_ids": list(range(3, 33))}, {"prompt_token_ids": [7, 200, 31]}]
    drawn = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=5, max_tokens=6, logprobs=5, prompt_logprobs=2)
    answers = {}
    for name in (True, False):
        with LLM(base.path, device="cpu", precision="int8", finer_logits=name, show_progress=False) as llm:
            answers[name] = [answer.outputs[0] for answer in llm.generate(asked, drawn)]
    for fine, coarse in zip(*answers.values(), strict=True):
        assert len(fine.token_ids) == 6 and fine.logprobs is not None and coarse.logprobs is not None
        likely = [max(each.logprob for each in one.values()) for one in (fine.logprobs[0], coarse.logprobs[0])]
        assert likely[0] == pytest.approx(likely[1], abs=0.05)
