"""A GPU packs adapters to the bits of a CPU: slots of a cache on disk may come from either."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream import LLM
from sidestream.graphs.lora_stacks import unchanged
from sidestream.graphs.model_directory import WEIGHTS
from sidestream.runtime.adapters.host_memory import Block
from sidestream.tools.bench.random_model import write_random_adapter

from .test_gpu_adapters import CONFIG

pytestmark = pytest.mark.gpu
SHAPE = CONFIG | {"hidden_size": 1024, "head_dim": 128, "intermediate_size": 2048}


def odd_adapter(path: Path, rank: int, dtype: torch.dtype, dora: bool = False) -> str:
    """An adapter whose rows have sizes from 1e-30 to 1e3, some are zero, and one value is as large as all others."""
    write_random_adapter(path, SHAPE, rank, rank, dora)
    tensors = load_file(path / WEIGHTS)
    source = torch.Generator().manual_seed(rank)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            sizes = 10 ** (33 * torch.rand(len(tensor), 1, generator=source) - 30)
            sizes[torch.rand(len(tensor), generator=source) < 0.1] = 0
            sizes[torch.rand(len(tensor), generator=source) < 0.5] = 1
            tensors[name] = (tensor.float() * sizes).clamp(-1000, 1000).to(dtype)
    save_file(tensors, path / WEIGHTS)
    if rank % 2:
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 7}))
    return str(path)


@pytest.mark.parametrize(
    "options",
    [{"precision": "int8"}, {"precision": "fp8"}, {"precision": "bf16"}, {"precision": "fp32"}],
    ids=lambda options: options["precision"],
)
def test_the_bits_of_a_cpu(tmp_path: Path, options: dict[str, Any]) -> None:
    adapters = {
        f"{rank}-{dtype}": odd_adapter(tmp_path / f"{rank}{dtype}", rank, dtype)
        for rank, dtype in ((16, torch.bfloat16), (5, torch.float16), (11, torch.float32))
    }
    adapters["dora"] = odd_adapter(tmp_path / "dora", 8, torch.bfloat16, dora=True)
    sizes = {"max_model_len": 256, "max_num_seqs": 2, "num_kv_pages": 16, "enforce_eager": True, "max_loras": 2}
    with LLM(SHAPE, adapters, load_format="dummy", show_progress=False, **sizes, **options) as llm:
        store = llm.model.runner.slot_loader.store
        for name, number in llm.registry.numbers.items():
            packed, expected = (Block(store._shapes) for _ in range(2))
            adapter = store._read(number)
            store._pack_on_device(adapter, packed)
            store._packer.pack(partial(store._slot_tensor, adapter, unchanged), expected.tensors)
            differing = [
                (stack, int((one.view(torch.uint8) != other.view(torch.uint8)).sum()))
                for stack, one, other in zip(store._recipes, packed.tensors, expected.tensors, strict=True)
                if not torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            ]
            assert not differing, f"{name}: {len(differing)} stacks differ, first {differing[:4]}"
            block = store.prepare(number)
            assert torch.equal(block.memory, expected.memory), name
            store.release(block)


def test_a_full_gpu_packs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = {"a": odd_adapter(tmp_path / "a", 16, torch.bfloat16)}
    sizes = {"max_model_len": 256, "max_num_seqs": 2, "num_kv_pages": 16, "enforce_eager": True}
    with LLM(SHAPE, adapters, load_format="dummy", show_progress=False, precision="int8", **sizes) as llm:
        store = llm.model.runner.slot_loader.store
        expected, found = (Block(store._shapes) for _ in range(2))
        adapter = store._read(llm.registry.numbers["a"])
        store._pack(adapter, expected)

        def full(*arguments: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(store, "_pack_on_device", full)
        store._pack(adapter, found)
        assert torch.equal(expected.memory, found.memory)
