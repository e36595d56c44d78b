"""Five hundred adapters over few slots: each request gets the answer that it gets alone."""

import os
import random

import pytest
import sidestream
from sidestream.tools.bench.random_model import TINY, write_model
from sidestream.tools.bench.serving.traffic import zipf_weights

ADAPTERS = 500
REQUESTS = int(os.environ.get("SIDESTREAM_ADAPTER_REQUESTS", "96"))
OPTIONS = {
    "load_format": "dummy",
    "precision": "fp32",
    "device": "cpu",
    "max_model_len": 256,
    "max_lora_rank": 16,
    "show_progress": False,
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("many"), TINY, ADAPTERS, 4)


def test_zipf_traffic_over_five_hundred_adapters(adapters):
    source = random.Random(5)
    llm = sidestream.LLM(
        TINY,
        adapters,
        max_loras=24,
        max_cpu_loras=48,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        num_kv_pages=64,
        **OPTIONS,
    )
    assert len(llm.adapters) == ADAPTERS
    chosen = source.choices(list(adapters), weights=zipf_weights(ADAPTERS), k=REQUESTS)
    prompts = [[source.randrange(512) for _ in range(source.randrange(2, 80))] for _ in chosen]
    params = [
        sidestream.SamplingParams(temperature=0, max_tokens=source.randrange(2, 9), ignore_eos=True) for _ in chosen
    ]
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, adapter=chosen, use_tqdm=False)]
    stats = llm.engine.scheduler.stats()
    assert (
        stats.adapter_evictions > 0
        and stats.adapters_resident <= 24
        and stats.pages_used == 0
        and len(set(chosen)) > 0.4 * REQUESTS
    )
    alone = sidestream.LLM(
        TINY,
        {name: adapters[name] for name in set(chosen)},
        max_loras=1,
        max_num_seqs=1,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        **OPTIONS,
    )
    for prompt, name, param, tokens in zip(prompts, chosen, params, outputs, strict=True):
        assert alone.generate([prompt], param, adapter=name, use_tqdm=False)[0].outputs[0].token_ids == tokens
    without = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert sum(one != other for one, other in zip(outputs, without, strict=True)) > REQUESTS // 4, "the adapters matter"
