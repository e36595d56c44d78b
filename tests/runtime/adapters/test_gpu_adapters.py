"""On a GPU: adapters that are copied while others decode, in and out of few slots, give the answers that they give
alone.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from sidestream.runtime.scheduler.step_plan import SLOT_DAMAGED
from sidestream.tools.bench.random_model import write_random_adapter

pytestmark = pytest.mark.gpu

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "precision": "fp32",
    "max_model_len": 512,
    "max_num_seqs": 12,
    "num_kv_pages": 60,
    "max_num_batched_tokens": 256,
    "max_lora_rank": 16,
    "show_progress": False,
    "gpu_memory_utilization": 0.3,
}


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_ten_adapters_over_two_slots(tmp_path: Path, enforce_eager: bool) -> None:
    paths = {f"a{index}": write_random_adapter(tmp_path / str(index), CONFIG, 16, index) for index in range(10)}
    source = random.Random(1)
    llm = sidestream.LLM(CONFIG, paths, max_loras=2, max_cpu_loras=4, enforce_eager=enforce_eager, **OPTIONS)
    chosen = [*source.choices([*paths, None], weights=[1 / rank for rank in range(1, 12)], k=50), *paths]
    beginning = [source.randrange(4096) for _ in range(130)]
    prompts = [
        (beginning if index % 3 == 0 else []) + [source.randrange(4096) for _ in range(source.randrange(3, 120))]
        for index in range(len(chosen))
    ]
    params = sidestream.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, adapter=chosen, use_tqdm=False)]
    stats = llm.engine.scheduler.stats()
    assert stats.adapter_loads >= 10 and stats.prefix_hits > 0 and stats.pages_used == 0
    store = llm.engine.runner.slot_loader.store
    for block in store._blocks.values():
        assert block.memory.is_pinned(), "copies from pageable memory would not be asynchronous"
    alone = sidestream.LLM(
        CONFIG, paths, max_loras=10, enable_prefix_caching=False, enforce_eager=enforce_eager, **OPTIONS
    )
    for prompt, name, tokens in zip(prompts, chosen, outputs, strict=True):
        assert alone.generate([prompt], params, adapter=name, use_tqdm=False)[0].outputs[0].token_ids == tokens


def test_starting_a_copy_does_not_wait_for_it(tmp_path: Path) -> None:
    paths = {f"a{index}": write_random_adapter(tmp_path / str(index), CONFIG, 16, index) for index in range(2)}
    llm = sidestream.LLM(CONFIG, paths, max_loras=2, enforce_eager=True, **OPTIONS)
    runner = llm.engine.runner
    while len(runner.slot_loader.store.numbers) < 2:
        time.sleep(0.01)
    runner.start_load(0, 1)  # the kernels that copy are on the device now
    assert runner.loaded(timeout=5.0) == [(0, 1, None)]
    torch.cuda.synchronize()
    runner.loaded()
    with torch.cuda.stream(runner.slot_loader._stream):
        torch.cuda._sleep(2 * 10**9)  # the copies' stream has about a second of other work
        worked = torch.cuda.Event()
        worked.record()
    runner.start_load(1, 0)
    while not runner.slot_loader._in_flight:
        time.sleep(0.001)
    assert not worked.query(), "the copy is queued, and no thread has waited for what comes before it"
    assert runner.loaded(timeout=5.0) == [(1, 0, None)]
    torch.cuda.synchronize()
    block = runner.slot_loader.store.acquire(0)
    for stack, tensor in zip(runner.slot_loader.stacks.values(), block.tensors, strict=True):
        assert (stack[1].cpu() == tensor).all()
    loader = runner.slot_loader
    assert loader.audit(0) and loader.audit(1) and runner.loaded() == []
    next(iter(loader.stacks.values()))[1].view(-1)[:1].view(torch.uint8)[0] ^= 1
    assert loader.audit(0) and loader.audit(1) and runner.loaded() == [(1, 0, SLOT_DAMAGED)]
