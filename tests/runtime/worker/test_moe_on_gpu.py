"""On a GPU: mixtures of experts with adapters of every kind in one batch, next to the same engine on a CPU."""

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import sidestream
import torch
from support.expert_adapters import DOWN, GATE_UP, SIZES, on_parameters, one_by_one, tiny_moe
from support.tiny import AdapterSpec, tiny_adapters

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    "max_model_len": 192,
    "max_num_seqs": 12,
    "num_kv_pages": 60,
    "max_num_batched_tokens": 64,
    "max_lora_rank": 16,
    "show_progress": False,
    "gpu_memory_utilization": 0.3,
}
GREEDY = sidestream.SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("family", SIZES)
def test_answers_are_those_of_a_cpu(tmp_path: Path, family: str, precision: str) -> None:
    base = tiny_moe(tmp_path, family)
    paths = {
        "stacks": on_parameters(base, GATE_UP, DOWN, targets=["q_proj", "o_proj"]),
        "down": on_parameters(base, DOWN, rank=12),
        "attention": tiny_adapters(base, [AdapterSpec(rank=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))])[0],
    }
    if family == "Qwen3Moe":
        paths["each-expert"] = one_by_one(base)
    dice = random.Random(2)
    chosen = [None, *paths, *dice.choices([None, *paths], k=5)]
    prompts = [[dice.randrange(320) for _ in range(dice.randrange(3, 90))] for _ in chosen]
    prompts[: 1 + len(paths)] = [prompts[0]] * (1 + len(paths))
    found: dict[str, list[Any]] = {}
    for device in ("cuda", "cpu"):
        adapters = {name: str(path) for name, path in paths.items()}
        with sidestream.LLM(str(base.path), adapters, precision=precision, device=device, **OPTIONS) as llm:
            found[device] = llm.generate(prompts, GREEDY, adapter=chosen, use_tqdm=False)
            if device == "cuda":
                alone = [
                    llm.generate([prompt], GREEDY, adapter=name, use_tqdm=False)[0].outputs[0].token_ids
                    for prompt, name in zip(prompts, chosen, strict=True)
                ]
    for name, on_gpu, on_cpu in zip(chosen, found["cuda"], found["cpu"], strict=True):
        differences = distances(on_gpu, on_cpu)
        if precision == "fp32":
            assert max(differences) < 1e-3, (name, max(differences))
            assert on_gpu.outputs[0].token_ids == on_cpu.outputs[0].token_ids, name
        else:  # near ties another expert may be chosen
            assert fmean(differences) < 0.06, (name, fmean(differences))
    effects = [fmean(distances(found["cuda"][0], output)) for output in found["cuda"][1 : 1 + len(paths)]]
    assert min(effects) > 0.01 and max(effects) > 0.3, "an adapter changes too little for this test"
    if precision == "fp32":
        assert alone == [output.outputs[0].token_ids for output in found["cuda"]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_answer_as_one(tmp_path: Path) -> None:
    base = tiny_moe(tmp_path, "Qwen3Moe")
    paths = {"stacks": str(on_parameters(base, GATE_UP, DOWN, targets=["q_proj", "o_proj"]))}
    dice = random.Random(3)
    chosen = [None, "stacks"] * 4
    prompts = [[dice.randrange(320) for _ in range(dice.randrange(3, 90))] for _ in chosen]
    found = {}
    for size in (1, 2):
        with sidestream.LLM(str(base.path), paths, precision="fp32", tensor_parallel_size=size, **OPTIONS) as llm:
            found[size] = llm.generate(prompts, GREEDY, adapter=chosen, use_tqdm=False)
    for one, two in zip(found[1], found[2], strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        assert max(distances(one, two)) < 1e-3


def distances(one: Any, other: Any) -> list[float]:
    """Absolute differences of the log-probabilities of one prompt."""
    tokens = one.prompt_token_ids[1:]
    assert tokens == other.prompt_token_ids[1:]
    pairs = zip(tokens, one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
    return [abs(first[token].logprob - second[token].logprob) for token, first, second in pairs]
