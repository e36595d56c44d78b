"""On a GPU: tensors of the GPU in an update answer like a directory, with CUDA graphs, and while requests switch."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from safetensors.torch import load_file
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
