"""On two GPUs: groups that a process makes one after the other answer the same, also after a rank has died."""

from typing import Any

import pytest
import torch
from sidestream import LLM, SamplingParams
from sidestream.runtime.worker.tensor_parallel.peers import RankError

from ...adapters.test_gpu_adapters import CONFIG

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
PROMPTS = [[1, 2, 3, 4, 5], list(range(100, 180))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SIZES: dict[str, Any] = {"load_format": "dummy", "max_model_len": 512, "max_num_seqs": 4, "num_kv_pages": 64}


def group() -> LLM:
    return LLM(CONFIG, tensor_parallel_size=2, show_progress=False, **SIZES)


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_three_groups_one_after_the_other() -> None:
    found, free = [], []
    for _ in range(3):
        with group() as llm:
            found.append(answers(llm))
        del llm
        free.append(torch.cuda.mem_get_info(1)[0])
    assert found[0] == found[1] == found[2]
    assert max(free) - min(free) < 64 << 20, "the second GPU's memory is free again"


def test_a_rank_that_dies_during_a_step_is_reported() -> None:
    """Rank 0's kernels wait for it: they end, and the process makes another group."""
    with group() as llm:
        expected = answers(llm)
        (child,) = llm.model.peers._children.values()
        child.process.kill()
        with pytest.raises(RankError, match=r"rank 1 of 2 died \(signal 9, SIGKILL\)"):
            for _ in range(1000):
                answers(llm)
    with group() as llm:
        assert answers(llm) == expected
