"""The benches on the demo model, small: every line of the table is there, and the figures hang together."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sidestream.compiler.cost import hardware
from sidestream.compiler.cost.hardware import H100, H200
from sidestream.compiler.options import CompileOptions, Precision
from sidestream.tools import cli
from sidestream.tools.bench import kernels as bench_kernels
from sidestream.tools.bench import kernels_attention
from sidestream.tools.bench import latency as bench_latency
from sidestream.tools.bench import layer as bench_layer
from sidestream.tools.bench.floors import floor_note, kv_bytes_per_token, weight_bytes
from sidestream.tools.bench.throughput import prompt_flops
from sidestream.tools.options.models import LLAMA_8B


def test_throughput_writes_a_row_for_each_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    tiny = [
        "--model",
        "demo",
        "--scale",
        "64",
        "--concurrency",
        "2",
        "--num-iters",
        "1",
        "--num-adapters",
        "2",
        "--lora-rank",
        "8",
        "--device",
        "cpu",
    ]
    assert cli.main(["bench", "throughput", *tiny, "--output-json", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [(row["workload"], row["concurrency"], row["lora"]) for row in rows] == [
        ("B", 2, "none"),
        ("P", 16, "none"),
        ("B", 2, "zipf"),
        ("P", 16, "zipf"),
    ]
    for row in rows:
        assert row["ttft_p50_ms"] <= row["ttft_p99_ms"] and row["output_tokens_per_second"] > 0
    balanced = rows[0]
    assert balanced["prompt_tokens_per_second"] == pytest.approx(balanced["output_tokens_per_second"] * 16 / 2)
    shown = capsys.readouterr().out
    assert "TTFT" in shown and "FP8 peak: none on a CPU; shares in the JSON are of 1979 TFLOP/s (H200)" in shown
    assert json.loads(target.read_text())["fp8_peak"]["gpu"] == "H200"


def test_latency_of_a_shape_over_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_clock(generate: Callable[[int], None], length: int, iterations: int) -> tuple[float, float, float]:
        generate(length)
        return 2.0, 0.0, 1.0

    monkeypatch.setattr(bench_latency, "measure", no_clock)
    monkeypatch.setattr(hardware, "gpu_here", lambda: H100)
    shape, target = tmp_path / "config.json", tmp_path / "out.json"
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 130}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    shape.write_text(json.dumps({**LLAMA_8B, **small, **heads, "bos_token_id": 0, "eos_token_id": 1}))
    sizes = ["--concurrency", "2", "--input-len", "8", "--output-len", "34", "--num-iters", "1", "--device", "cpu"]
    adapters = ["--num-adapters", "2", "--num-dora", "1", "--lora-rank", "8"]
    command = ["bench", "latency", "--shape", str(shape), *sizes, *adapters, "--output-json", str(target)]
    assert cli.main([*command, "--tensor-parallel-size", "2"]) == 0
    found = json.loads(target.read_text())
    assert found["options"]["tensor_parallel_size"] == 2
    assert [(row["lora"], row["concurrency"]) for row in found["rows"]] == [("none", 2), ("zipf", 2)]
    assert found["floor_of"]["name"] == "H100" and found["floor_of"]["bytes_per_second"] == pytest.approx(3.03e12)
    config, context = json.loads(shape.read_text()), 2 * (8 + (32 + 34) / 2)
    needed = weight_bytes(config, "int8") + context * kv_bytes_per_token(config, 1)
    assert found["rows"][0]["floor_ms"] == pytest.approx(1e3 * needed / 3.03e12 / 2, rel=1e-3)
    assert "ms/step" in capsys.readouterr().out
    assert cli.main([*command, "--tensor-parallel-size", "2", "--speculate", "3"]) != 0
    assert "--speculate is measured in one process" in capsys.readouterr().err


def test_a_warm_start_captures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.json"
    arguments = [
        "bench",
        "startup",
        "--model",
        "demo",
        "--max-num-seqs",
        "2",
        "--num-adapters",
        "1",
        "--lora-rank",
        "8",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr("sys.argv", ["sidestream", *arguments])
    for _ in range(3):  # a busy machine may delay any part of a start
        assert cli.main([*arguments, "--output-json", str(target)]) == 0
        seconds = json.loads(target.read_text())["seconds"]
        if seconds["warm"]["capture_and_passes"] < seconds["cold"]["capture_and_passes"] / 3:
            break
    else:
        raise AssertionError(f"a warm start captures: {seconds}")


def test_prefill_work_is_two_operations_a_weight_and_the_attention() -> None:
    assert prompt_flops(LLAMA_8B, 1, 1) == pytest.approx(2 * 6.98e9, rel=0.001)
    assert prompt_flops(LLAMA_8B, 16, 2048) > 16 * 2048 * prompt_flops(LLAMA_8B, 1, 1)


def test_kernels_are_those_of_a_layer_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The selection of steps on a small model; the clock is a GPU's."""
    small = {
        **LLAMA_8B,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    }
    for module in (bench_layer, bench_kernels):
        monkeypatch.setattr(module, "DEPTHS", (4,))
    monkeypatch.setattr(bench_layer, "VOCABULARY", 256)
    monkeypatch.setattr(bench_kernels, "launch_us", lambda launches, rounds, repeats: float(len(launches)))

    def measure(precision: Precision) -> list[bench_kernels.Row]:
        return bench_kernels.measure(
            bench_layer.Layers(16, 2, "cpu", CompileOptions(precision=precision), small),
            4,
            [0, 1, 0, 1],
            repeats=1,
            gpu=H200,
        )

    table = {precision: measure(precision) for precision in ("int8", "fp8")}
    for rows in table.values():
        main = [row.op.removeprefix("sidestream.") for row in rows if "lora" not in row.op]
        assert (
            main[:4] == ["add_rms_norm_quant", "linear_8bit", "rope_append", "paged_attention_quant"] and len(main) == 9
        )
        assert len(rows) - len(main) == 8 and all(row.us == 4 - 2 and row.floor_us > 0 for row in rows)
    # the same steps; int8's adapters have half the bytes
    for int8, fp8 in zip(table["int8"], table["fp8"], strict=True):
        assert (int8.op, int8.output) == (fp8.op, fp8.output) and (
            int8.floor_us < fp8.floor_us if "lora" in int8.op else int8.floor_us <= fp8.floor_us
        )


def test_the_tables_footnote_names_the_gpu_and_its_bandwidth() -> None:
    assert floor_note(H100, True, 1).endswith("read once at 3.03 TB/s (H100)")
    assert floor_note(H200, True, 2).endswith("read once at 4.68 TB/s (H200), a part on each of 2 GPUs")


def test_attention_is_held_against_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_attention, "time_attention", lambda *sizes, **how: 100.0)
    for gpu in (H200, H100):
        row = kernels_attention.decode_row("1 x 1024", [1024], "bf16", 1, gpu)
        moved = kernels_attention.moved_bytes([1024], "bf16")
        assert row.share == pytest.approx(moved / 100e-6 / gpu.bytes_per_second(), abs=1e-3)
    sequences = ((4096, 4096),) * 4
    known, unknown = (
        kernels_attention.prefill_row("4 x 4096", sequences, "bf16", 1, gpu)
        for gpu in (H100, replace(H100, known_rates=False))
    )
    assert known.share == pytest.approx(kernels_attention.operations(sequences) / 100e-6 / 989e12, abs=1e-3)
    assert unknown.share == 0.0 and unknown.rate == known.rate
