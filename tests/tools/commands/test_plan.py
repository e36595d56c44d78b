"""`sidestream plan`: sizes and rates of the demo model, and what is said of wrong arguments."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.tools import cli
from sidestream.tools.commands.plan import gpu_and_memory

SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--prompt-tokens", "100", "--output-tokens", "50")
TIERS = ("--kv-host-gb", "2", "--kv-disk-gb", "20")


def test_the_demo_model_on_two_sizes_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text((DEMO_MODEL / "config.json").read_text())  # no weights are needed
    facts: dict[str, Any] = {}
    for gpu in ("h100-1", "H100-1.1GB"):
        arguments = [str(tmp_path), "--max-loras", "3", "--max-lora-rank", "17", *SMALL, "--gpu", gpu]
        assert cli.main(["plan", *arguments, "--json"]) == 0
        facts[gpu] = json.loads(capsys.readouterr().out)
    small, large = facts.values()
    assert (small["gpu"], small["slots"], small["rank"]) == ("H100", 3, 32)
    memory, page = small["memory"], 64 * small["memory"]["kv_token"]
    used = sum(memory[name] for name in ("weights", "adapter_slots", "activations", "reserve"))
    assert abs(small["kv_tokens"] // 64 - (0.9e9 - used) // page) <= 1
    assert abs(large["kv_tokens"] - small["kv_tokens"] - 0.09e9 // memory["kv_token"]) <= 128
    assert small["requests_at_once"] == 4 and [load["requests"] for load in small["loads"]] == [1, 4]
    for load in small["loads"]:
        seconds = 100 / small["prompt_tokens_per_second"] + 50 * load["step_ms"] / 1e3 / load["requests"]
        assert load["requests_per_second"] == pytest.approx(1 / seconds)
        assert load["gpu_hours"] == pytest.approx(1e6 / 3600 / (50 / seconds))
    assert cli.main(["plan", str(tmp_path), *SMALL, "--gpu", "h200", "--price", "1000000", *TIERS]) == 0
    shown = capsys.readouterr().out
    hours = shown.splitlines()[-3].split()[-1]
    host_tokens = (2 << 30) // page * 64
    assert small["kv_host_tokens"] == 0 and f"prefixes in host memory    {host_tokens:,} tokens" in shown
    assert f"prefixes on disk           {(20 << 30) // page * 64:,} tokens" in shown
    assert "0 adapter slots of rank 0" in shown and "H200 with 141 GB" in shown and float(hours) > 1
    assert cli.main(["plan", str(tmp_path), *SMALL, "--gpu", "h100-0.7"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lama-3.1-8b"], "neither a directory nor a shape: llama-3.1-8b"),
        (["no/such"], "is neither a directory nor in the local hub cache"),
        (["--gpu", "a100"], "only for H200, H100"),
        (["--gpu", "h100-lots"], "--gpu h100-lots: 'lots' is not a memory in GB; write it such as h100-80"),
        (["--gpu", "h100-0"], "'0' is not a memory"),
        (["--gpu", "h100-nan"], "'nan' is not a memory"),
        (["--gpu", "h100", "--prompt-tokens", "99999"], "raise --max-model-len"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_names_of_gpus() -> None:
    for name, gigabytes in (("h100", 80), ("H200-141", 141), ("h100-94GB", 94), ("NVIDIA H100 80GB HBM3", 80)):
        gpu, memory = gpu_and_memory(name)
        assert (gpu.name, memory) == (name.upper().replace("NVIDIA ", "")[:4], gigabytes * 10**9)


def test_dense_layers_of_a_mixture_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers with experts and dense ones, in any order, have the weights of transformers' model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 128, "vocab_size": 320}
    for dense in ([], [0, 3], [0, 1, 2, 3, 4]):
        config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=5, mlp_only_layers=dense)
        config.save_pretrained(tmp_path)
        with torch.device("meta"):
            expected = 2 * sum(each.numel() for each in Qwen3MoeForCausalLM(config).parameters())
        arguments = [str(tmp_path), *SMALL, "--gpu", "h100", "--precision", "bf16", "--json"]
        assert cli.main(["plan", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["memory"]["weights"] == pytest.approx(expected, abs=2048)
