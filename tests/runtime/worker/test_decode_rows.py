"""Steps with few prompt tokens that run as decode steps give the answers of steps for prompts."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sidestream import LLM, SamplingParams
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.scheduler.step_plan import StepPlan
from sidestream.runtime.worker import decode_rows
from sidestream.runtime.worker.decode_rows import as_decode_rows
from sidestream.tools.bench.random_model import write_model
from support.sampling_plans import plan, sampling
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama

WIDE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 32,
    "num_kv_pages": 60,
    "max_num_batched_tokens": 32,
    "show_progress": False,
}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_answers_are_those_of_steps_for_prompts(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts beside answers, adapters, cached beginnings, log-probabilities of prompts, biases."""
    base = tiny_llama(tmp_path)
    paths = tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=8, targets=("q_proj", "v_proj", "down_proj"))])
    adapters = {f"a{index}": str(path) for index, path in enumerate(paths)}
    dice = random.Random(4)
    shared = [dice.randrange(300) for _ in range(40)]
    prompts, params, chosen = [], [], []
    for index in range(14):
        own = [dice.randrange(300) for _ in range(dice.randrange(1, 20))]
        prompts.append(shared[: 16 * (index % 3)] + own)
        more: dict[str, Any] = [{}, {"prompt_logprobs": 1}, {"temperature": 1.0, "seed": index, "logprobs": 3}][
            index % 3
        ]
        params.append(SamplingParams(**{"temperature": 0.0, "max_tokens": 9, "ignore_eos": True, **more}))
        chosen.append([None, *adapters][index % 3])
    found, ran = {}, []
    made = as_decode_rows

    def counted(step: StepPlan, most: int) -> StepPlan | None:
        rows = made(step, most)
        ran.append(rows is not None)
        return rows

    monkeypatch.setattr("sidestream.runtime.worker.model_runner.as_decode_rows", counted)
    for rows in (False, True):
        with LLM(str(base.path), adapters, precision=precision, **OPTIONS) as llm:
            llm.model.runner.decode_rows = rows
            outputs = llm.generate(prompts, params, adapter=chosen, use_tqdm=False)
            outputs += llm.generate(prompts[::-1], params[::-1], adapter=chosen[::-1], use_tqdm=False)
            found[rows] = [
                (output.outputs[0].token_ids, output.prompt_logprobs, output.outputs[0].logprobs) for output in outputs
            ]
        assert any(ran) == rows
    assert found[True] == found[False]


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "most", "mean"), [("fp32", 1e-3, 1e-4), ("int8", 0.5, 0.05)])
def test_on_the_gpu(tmp_path: Path, precision: str, most: float, mean: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of decode steps read the keys of a row that another row of the same step has just written. Prompts that
    begin in other ways differ by far more than roundings.
    """
    adapters = write_model(tmp_path, WIDE, 2, 8)
    dice = random.Random(4)
    prompts = [[dice.randrange(WIDE["vocab_size"]) for _ in range(dice.randrange(20, 90))] for _ in range(24)]
    chosen = [[None, *adapters][index % 3] for index in range(24)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
    sizes = {"max_model_len": 256, "num_kv_pages": 100, "max_num_seqs": 48, "max_num_batched_tokens": 64}
    options = OPTIONS | sizes | {"device": "cuda"}
    found, ran = {}, {False: 0, True: 0}
    made = as_decode_rows

    def counted(step: StepPlan, most_rows: int) -> StepPlan | None:
        rows = made(step, most_rows)
        ran[rows is not None] += 1
        return rows

    monkeypatch.setattr("sidestream.runtime.worker.model_runner.as_decode_rows", counted)
    for rows in (False, True):
        with LLM(WIDE, adapters, load_format="dummy", precision=precision, **options) as llm:
            llm.model.runner.decode_rows = rows
            outputs = []
            for first in range(0, 24, 6):
                some = slice(first, first + 6)
                outputs += llm.generate(prompts[some], params, adapter=chosen[some], use_tqdm=False)
        found[rows] = [
            [output.prompt_logprobs[place][token].logprob for place, token in enumerate(prompt) if place]
            for output, prompt in zip(outputs, prompts, strict=True)
        ]
    assert ran[True] > 20
    errors = [abs(a - b) for one, other in zip(*found.values(), strict=True) for a, b in zip(one, other, strict=True)]
    spread = [abs(a - b) for one in found[True] for a, b in itertools.pairwise(one)]
    print(f"{ran} largest {max(errors):.5f}, mean {sum(errors) / len(errors):.6f}; between tokens {max(spread):.3f}")
    assert max(errors) < most < max(spread) and sum(errors) < mean * len(errors) < sum(spread)


def step(lengths: list[int], contexts: list[int], **fields: Any) -> StepPlan:
    """A step of sequences with `lengths` query tokens at the end of `contexts`."""
    tokens = sum(lengths)
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    made = plan(sampling(len(lengths)))
    arrays = {
        "decode": max(lengths) == 1,
        "input_ids": np.arange(tokens, dtype=np.int32),
        "block_table": np.arange(len(lengths) * 3, dtype=np.int32).reshape(-1, 3),
        "context_lens": np.asarray(contexts, np.int32),
        "query_start": ends,
        "logits_indices": ends[1:] - 1,
    }
    return StepPlan(**{**vars(made), **arrays, **fields})


def test_a_row_reads_the_tokens_before_it() -> None:
    rows = as_decode_rows(step([1, 3, 2], [20, 3, 40]), 8)
    assert rows is not None and rows.decode
    assert rows.context_lens.tolist() == [20, 1, 2, 3, 39, 40]
    assert rows.block_table[:, 0].tolist() == [0, 3, 3, 3, 6, 6]
    assert rows.query_start.tolist() == list(range(7)) and rows.logits_indices.tolist() == list(range(6))


def test_steps_that_would_take_longer_are_left_alone() -> None:
    assert as_decode_rows(step([1, 1], [4, 4]), 8) is None, "a decode step"
    assert as_decode_rows(step([1, 8], [4, 8]), 8) is None, "more rows than any decode program"
    extra = decode_rows.MOST_EXTRA_ROWS
    assert as_decode_rows(step([1 + extra], [1 + extra]), 256) is not None
    assert as_decode_rows(step([2 + extra], [2 + extra]), 256) is None
    long = decode_rows.MOST_EXTRA_CONTEXT
    assert as_decode_rows(step([1, 2], [long, long]), 256) is not None, "one row reads it once more"
    assert as_decode_rows(step([3], [long]), 256) is None
    assert as_decode_rows(step([4], [PAGE_SIZE]), 256) is not None
    assert as_decode_rows(step([1, 4], [7, PAGE_SIZE + 1]), 256) is None, "kernels fetch all but the last page earlier"
    assert as_decode_rows(step([2], [9], follow_rows=np.zeros(1, np.int32)), 256) is None, "with speculation"
