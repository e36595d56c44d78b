"""On two GPUs: groups that a process makes one after the other answer the same, also after a rank has died."""

import pytest
import torch
from sidestream import LLM, SamplingParams

from ...adapters.test_gpu_adapters import CONFIG

PROMPTS = [[1, 2, 3, 4, 5], list(range(100, 180))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_three_groups_one_after_the_other() -> None:
    found, free = [], []
    for _ in range(3):
        with LLM(
            CONFIG,
            tensor_parallel_size=2,
            load_format="dummy",
            max_model_len=512,
            max_num_seqs=4,
            num_kv_pages=64,
            show_progress=False,
        ) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)])
            if len(found) == 2:  # the peer dies during steps: rank 0's kernels wait for it
                (child,) = llm.model.peers._children.values()
                child.process.kill()
                with pytest.raises(RuntimeError, match="rank 1 of 2 died"):
                    for _ in range(100):
                        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        del llm
        free.append(torch.cuda.mem_get_info(1)[0])
    assert found[0] == found[1] == found[2]
    assert max(free) - min(free) < 64 << 20, "the second GPU's memory is free again"
