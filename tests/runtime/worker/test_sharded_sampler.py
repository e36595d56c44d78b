"""Ranks that sample from parts of the logits draw what one process draws from all of them, to the bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sidestream.ops.collectives.tensor_parallel_group import RankGroup
from sidestream.runtime.scheduler.step_plan import SamplingPlan, StepMasks
from sidestream.runtime.worker.sampler import Sampler
from sidestream.runtime.worker.sharded_sampler import ShardedSampler, needs_all_logits
from support.ranks import run_on_ranks
from support.sampling_plans import int32, plan, sampling

ROWS, VOCABULARY, WORLD = 24, 323, 4
WIDTH = 96  # 323 tokens over four ranks, in multiples of 16: the last one has 35, and columns that are none
TEMPERATURE = np.asarray([0, 0.7, 1.0, 1e-6, 2.0, 0.01] * (ROWS // 6), np.float32)
ONES = np.ones(ROWS, np.float32)


def cases() -> dict[str, SamplingPlan]:
    plain = {"temperature": TEMPERATURE, "seeds": np.arange(ROWS, dtype=np.int64) * 977}
    return {
        "greedy": sampling(ROWS, greedy=True, temperature=0 * ONES),
        "drawn": sampling(ROWS, **plain),
        "filtered where it is greedy": sampling(
            ROWS, **plain, top_k=np.where(TEMPERATURE < 1e-5, 3, 0).astype(np.int32)
        ),
        "top-k": sampling(ROWS, **plain, top_k=np.full(ROWS, 5, np.int32)),
        "top-p": sampling(ROWS, **plain, top_p=0.5 * ONES),
        "min-p": sampling(ROWS, **plain, min_p=0.2 * ONES),
        "log-probabilities": sampling(ROWS, **plain, num_logprobs=2),
        "a bias": sampling(
            ROWS, **plain, bias_rows=int32(0), bias_tokens=int32(7), bias_values=np.asarray([99], np.float32)
        ),
    }


PLAIN = {"greedy", "drawn", "filtered where it is greedy"}


def logits_of(dtype: torch.dtype) -> torch.Tensor:
    """Logits that tie often; a row with NaN, one with an infinity."""
    logits = (torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 3).round()
    logits[5, 300], logits[11, 100] = torch.nan, torch.inf
    return logits.to(dtype)


def masks() -> StepMasks:
    words = np.full((1, -(-VOCABULARY // 32)), 1 << 5, np.int32)
    return StepMasks(0, int32(2), int32(0), words)


def on_ranks(group: RankGroup) -> dict[str, torch.Tensor]:
    found, gathered = {}, []
    gather = RankGroup.gather

    def counted(self: RankGroup, part: torch.Tensor) -> list[torch.Tensor]:
        gathered.append(part.numel() * part.element_size())
        return gather(self, part)

    RankGroup.gather = counted  # type: ignore[method-assign]
    for dtype in (torch.float32, torch.bfloat16):
        part = torch.full((ROWS, WIDTH), 99.0, dtype=dtype)  # what fills up a part would win if it counted
        own = logits_of(dtype)[:, group.rank * WIDTH : (group.rank + 1) * WIDTH]
        part[:, : own.shape[1]] = own
        sampler = ShardedSampler(Sampler(ROWS, torch.device("cpu")), group, VOCABULARY)
        for name, settings in cases().items():
            gathered.clear()
            found[f"{name} {dtype}"] = sampler(part, plan(settings)).tokens
            found[f"bytes of {name} {dtype}"] = torch.tensor(sum(gathered))
        found[f"masked {dtype}"] = sampler(part, plan(cases()["drawn"]), masks()).tokens
        positions = torch.arange(ROWS, dtype=torch.int32)
        found[f"moved {dtype}"] = sampler(part, plan(cases()["drawn"]), None, positions).tokens
    RankGroup.gather = gather  # type: ignore[method-assign]
    return found


def test_parts_are_sampled_as_the_whole_is(tmp_path: Path) -> None:
    ranks = run_on_ranks(WORLD, on_ranks, tmp_path)
    whole = Sampler(ROWS, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(dtype)
        expected = {name: whole(logits, plan(settings)).tokens for name, settings in cases().items()}
        expected["masked"] = whole(logits, plan(cases()["drawn"]), masks()).tokens
        moved = torch.arange(ROWS, dtype=torch.int32)
        expected["moved"] = whole(logits, plan(cases()["drawn"]), None, moved).tokens
        assert not torch.equal(expected["moved"], expected["drawn"]) and (expected["drawn"] == -1).sum() == 2
        for found in ranks:
            for name, tokens in expected.items():
                assert torch.equal(found[f"{name} {dtype}"], tokens), name
            for name in cases():
                sent = found[f"bytes of {name} {dtype}"].item()
                assert sent == 8 * ROWS * (1 if name == "greedy" else 2) if name in PLAIN else sent >= ROWS * WIDTH * 2


@pytest.mark.parametrize("name", cases())
def test_which_steps_need_no_logits_of_other_ranks(name: str) -> None:
    assert needs_all_logits(cases()[name]) == (name not in PLAIN)
    assert needs_all_logits(cases()[name], masks())
