"""On the CPU greedy tokens are the request's own: they do not depend on what else is in the batch, how prompts are
cut, or what was cached.
"""

import random

import pytest
import sidestream
from sidestream.tools.bench.model_directory import TINY, write_model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_greedy_tokens_do_not_depend_on_the_batch(tmp_path, precision):
    source = random.Random(7)
    adapters = write_model(tmp_path, TINY, 3, 8)
    options = {
        "load_format": "dummy",
        "precision": precision,
        "device": "cpu",
        "max_model_len": 192,
        "max_loras": 3,
        "show_progress": False,
    }
    beginning = [source.randrange(512) for _ in range(70)]
    prompts = [
        (beginning if index % 3 == 0 else []) + [source.randrange(512) for _ in range(source.randrange(1, 90))]
        for index in range(10)
    ]
    chosen = [source.choice([None, *adapters]) for _ in prompts]
    params = sidestream.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for size, tokens, caching in ((1, 192, False), (16, 64, True), (5, 256, False)):
        llm = sidestream.LLM(
            TINY, adapters, max_num_seqs=size, max_num_batched_tokens=tokens, enable_prefix_caching=caching, **options
        )
        answers.append(
            [output.outputs[0].token_ids for output in llm.generate(prompts, params, adapter=chosen, use_tqdm=False)]
        )
    assert answers[0] == answers[1] == answers[2]
