"""On a GPU: tensors of the GPU in an update answer like a directory, with CUDA graphs, and while requests switch."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from safetensors.torch import load_file
from sidestream.runtime.adapters.host_store import HostStore
from sidestream.tools.bench.random_model import write_random_adapter

from .test_gpu_adapters import CONFIG, OPTIONS

pytestmark = pytest.mark.gpu


def stored(path: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = load_file(Path(path, "adapter_model.safetensors"), device="cuda")
    return tensors, json.loads(Path(path, "adapter_config.json").read_text())


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_tensors_of_the_gpu(tmp_path: Path, precision: str) -> None:
    paths = [write_random_adapter(tmp_path / str(index), CONFIG, 16, index) for index in range(3)]
    source = random.Random(1)
    prompt = [source.randrange(4096) for _ in range(100)]
    params = sidestream.SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, skip_reading_prefix_cache=True
    )  # the same plans give the same bits

    def answer(name: str) -> Any:
        output = llm.generate([prompt], params, adapter=name, use_tqdm=False)[0].outputs[0]
        return output.token_ids, output.logprobs

    with sidestream.LLM(CONFIG, max_loras=2, **OPTIONS | {"precision": precision}) as llm:
        store = llm.model.runner.slot_loader.store
        for version, path in enumerate(paths, 1):
            tensors, config = stored(path)
            made = llm.update_adapter("policy", tensors, config)
            assert made.version == version
            llm.add_adapter("file", path, replace=True)
            blocks = [store.prepare(llm.registry.numbers[name]) for name in ("file", "policy")]
            assert torch.equal(*(torch.from_numpy(block.bytes) for block in blocks))
            for block in blocks:
                store.release(block)
            assert answer("policy") == answer("file")
        tokens, versions = [], None
        for chunk in llm.stream([prompt], params, adapter="policy"):
            tokens += chunk.token_ids
            versions = chunk.versions
            if len(tokens) == 5 and versions is None:
                llm.update_adapter("policy", *stored(paths[0]), inflight="switch")
        assert versions is not None and [version for _, version in versions] == [3, 4]
        begin = versions[1][0]
        assert tokens[:begin] == answer("policy@3")[0][:begin] and len(tokens) == 24
        assert answer("policy") == answer("policy@1"), "the same content"


@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16", "fp32"])
def test_a_gpu_packs_the_bits_of_a_cpu(tmp_path: Path, precision: str) -> None:
    adapters = {f"a{rank}": write_random_adapter(tmp_path / str(rank), CONFIG, rank, rank) for rank in (4, 16)}
    with sidestream.LLM(CONFIG, adapters, max_loras=2, **OPTIONS | {"precision": precision}) as llm:
        loader = llm.model.runner.slot_loader
        store = loader.store
        stacks = {name: stack.cpu() for name, stack in loader.stacks.items()}
        constants = store._constants
        other = HostStore(store._recipes, stacks, llm.registry, loader.lora, 4, threading.Lock(), constants)
        for name in adapters:
            blocks = [each.prepare(llm.registry.numbers[name]) for each in (store, other)]
            values = [torch.from_numpy(block.bytes) for block in blocks]
            assert torch.equal(*values) and values[0].count_nonzero() > 10_000
