"""`sidestream tune`: what it would measure, how it chooses, and the table that it writes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sidestream.ops.core.device import H200_SMS
from sidestream.ops.linear import kernel_selection as tuning
from sidestream.ops.linear.kernel_selection import LinearConfig
from sidestream.ops.moe.kernel_triton import candidates, default_config, grouped_config
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.tools import cli
from sidestream.tools.options.engine import DEFAULT_PRECISION
from sidestream.tools.tuning import bench as tune_bench
from sidestream.tools.tuning import grouped as tune_grouped
from sidestream.tools.tuning import layers as tune_layers
from sidestream.tools.tuning.table import Job, Timing, has_entry, set_entry, write
from sidestream.tools.tuning.tune import DTYPES, LAYERS, activation_configs, choose, linear_configs


def test_a_dry_run_lists_the_shapes_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "gate_up  [28672, 4096] x 256" in shown and "lm_head  [128256, 4096] x 16" in shown and "minute" in shown
    assert f"of {DEFAULT_PRECISION}, about" in shown
    assert cli.main(["tune", "--dry-run", "--dtype", "fp8"]) == 0 and "of fp8, about" in capsys.readouterr().out
    assert cli.main(["tune", str(DEMO_MODEL), "--dry-run", "--layers", "down", "--tokens", "100", "128", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    shape = f"[{config['hidden_size']}, {config['intermediate_size']}]"
    assert [line.split(" configurations")[0].split()[:-1] for line in lines[:-1]] == [
        f"down  {shape} x {tokens}".split() for tokens in (16, 128)
    ]


def test_several_models_share_entries_and_what_the_table_has_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    table: dict[str, Any] = {"device": "NVIDIA H200", "models": []}
    set_entry(table, "linear_8bit", Job("lm_head", 32768, 4096, 16), LinearConfig("gluon"))
    write(path, table)
    assert has_entry(table, Job("lm_head", 32768, 4096, 16)) and not has_entry(
        table, Job("lm_head", 32768, 4096, 16, "fp8")
    )
    expected = [
        "qkv [6144, 4096] x 16",  # the same in all three
        "lm_head [128256, 4096] x 16",
        "lm_head [32768, 4096] x 16",
        "lm_head [151936, 4096] x 16",
    ]
    asked = ["tune", "llama-3.1-8b", "mistral-7b", "qwen3-8b", "--dry-run", "--tokens", "16", "-o", str(path)]
    for more in ([], ["--missing"]):
        assert cli.main([*asked, "--layers", "qkv", "lm_head", *more]) == 0
        lines = capsys.readouterr().out.splitlines()[:-1]
        assert [" ".join(line.split()[:-2]) for line in lines] == expected
        expected = [shape for shape in expected if "[32768," not in shape]


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", str(tmp_path), "--dry-run"]) == 2
    assert "config.json" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main(["tune"]) == 2
        assert "--dry-run" in capsys.readouterr().err


def test_int8_has_neither_scaled_mm_nor_sums_to_promote() -> None:
    for dtype, whole in (("int8", True), ("fp8", False)):
        for tokens in (16, 128, 512):
            job = Job("gate_up", 28672, 4096, tokens, dtype)
            found = [*linear_configs(job, H200_SMS), *activation_configs(job, H200_SMS)]
            assert any(config.kernel == "scaled_mm" for config in found) == (not whole and tokens > 16)
            assert any(config.promote for config in found) == (not whole and tokens > 16)
    assert not activation_configs(Job("gate_up", 28672, 4096, 64), H200_SMS) and not activation_configs(
        Job("qkv", 6144, 4096, 256), H200_SMS
    )


class FakeBench:
    """Says that the first configuration is the fastest, and that one launch takes `one` us where two take 100."""

    made: list[torch.dtype]
    one: float

    def __init__(self, n: int, k: int, tokens: int, repeats: int, dtype: torch.dtype) -> None:
        self.made.append(dtype)

    def linear(self, configs: list[LinearConfig], *rest: Any) -> list[Timing]:
        return [Timing(config, 10.0 + 5 * i, 1.7e-3) for i, config in enumerate(configs)]

    def activation(self, configs: list[LinearConfig], separate: LinearConfig, *rest: Any) -> tuple[list[Timing], float]:
        return [Timing(config, self.one, 1.7e-3) for config in configs], 100.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_has_its_sections(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeBench, "made", [], raising=False)
    monkeypatch.setattr(tune_bench, "Bench", FakeBench)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=H200_SMS)
    )
    path, other = tmp_path / "table.json", {"fp8": "linear_int8", "int8": "linear_fp8"}[dtype]
    kept = [{"layer": "down", "n": 4096, "k": 14336, "tokens": {"16": {"kernel": "triton"}}}]
    path.write_text(json.dumps({"device": "", "models": ["a model"], other: kept}))
    place = (28672, 4096, 256)
    for one, fused in ((98.5, False), (97.5, True)):
        monkeypatch.setattr(FakeBench, "one", one, raising=False)
        assert cli.main(["tune", "--dtype", dtype, "--layers", "gate_up", "--tokens", "256", "-o", str(path)]) == 0
        assert FakeBench.made[-1] == {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[dtype]
        tuning.read_table.cache_clear()
        assert list(tuning.read_table(path, f"linear_{dtype}")) == [place]
        assert list(tuning.read_table(path, f"linear_{dtype}_silu_mul")) == [place] * fused
        table = json.loads(path.read_text())
        assert table[other] == kept and f"{other}_silu_mul" not in table and table["device"] == "NVIDIA H200"
        assert table["models"] == ["a model", "llama-3.1-8b"]
    assert "with SiLU" in capsys.readouterr().out


def test_experts_have_entries_for_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of Qwen3-30B-A3B: eight experts of a token, so an entry for 16 pairs and no more for the dense MLP."""
    assert cli.main(["tune", "qwen3-30b-a3b", "--dry-run", "--tokens", "16", "--layers", *LAYERS[2:]]) == 0
    lines = [line.split(" configurations")[0].split() for line in capsys.readouterr().out.splitlines()[:-1]]
    linears = ("experts_gate_up [1536, 2048]", "experts_down [2048, 768]")
    expected = [f"{linear} x {pairs}" for linear in linears for pairs in (16, 32, 64, 128)]
    assert [" ".join(line[:-1]) for line in lines] == ["lm_head [151936, 2048] x 16", *expected]
    assert cli.main(["tune", "llama-3.1-8b", "--dry-run", "--layers", "experts_down"]) == 0
    assert capsys.readouterr().out.startswith("0 configurations in 0 entries")


class FakeGroupedBench:
    """Says that the last configuration is the fastest, with SiLU * mul the last but one."""

    def __init__(self, job: Job, repeats: int) -> None:
        assert (job.experts, job.top_k, job.tokens) == (8, 2, 32)

    def timings(self, configs: list[LinearConfig], activate: bool, *rest: Any) -> list[Timing]:
        fastest = configs[-2 if activate else -1]
        return [Timing(config, 1.0 if config is fastest else 2.0, 1.7e-3) for config in configs]


def test_measured_experts_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_grouped, "GroupedBench", FakeGroupedBench)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=H200_SMS)
    )
    path, (n, k) = tmp_path / "table.json", (28672, 4096)
    asked = ["tune", "mixtral-8x7b", "--layers", "experts_gate_up", "--tokens", "32", "-o", str(path)]
    for dtype in DTYPES:  # the second keeps the entries of the first
        assert cli.main([*asked, "--dtype", dtype]) == 0
    assert cli.main([*asked, "--missing"]) == 0, "all are there"
    monkeypatch.setattr(tuning, "TUNED", path)
    tuning.read_table.cache_clear()
    for dtype in (torch.int8, torch.float8_e4m3fn):
        found = candidates(16, dtype)
        assert found[-1] == grouped_config(64, 16, n, k, dtype) != default_config(16, dtype)
        assert found[-2] == grouped_config(64, 16, n, k, dtype, activate=True)
        assert grouped_config(65, 16, n, k, dtype) == default_config(16, dtype), "another number of pairs"
    tuning.read_table.cache_clear()


@pytest.mark.parametrize(("layer", "n", "k"), [("experts_gate_up", 96, 64), ("experts_down", 64, 48)])
def test_experts_are_measured_with_operands_of_their_ops(layer: str, n: int, k: int) -> None:
    bench = tune_grouped.GroupedBench(Job(layer, n, k, 5, "int8", experts=6, top_k=3), 1, "cpu")
    for activate in (False, True)[: 2 if layer == "experts_gate_up" else 1]:
        (out,), (expected,) = bench.outputs(activate)
        assert out.shape == expected.shape == (15, n // 2 if activate else n)
        assert expected.isfinite().all() and 0.1 < float(expected.float().std()) < 3


class FakeLayers:
    """Layers are fastest with the fewest programs, whose linear is among the slower ones alone; with other registers
    than 72 they are a little slower.
    """

    def __init__(self, config: dict[str, Any], dtype: str) -> None:
        assert config["hidden_size"] == 4096 and dtype == "int8"

    def us(self, job: Job, config: LinearConfig, lora: bool) -> float:
        programs = tuning.work_split(config, job.tokens, job.n, job.k, H200_SMS).programs
        return programs + (config.max_registers != 72) + (20.0 if lora else 0.0)


def test_in_layers_another_configuration_may_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Even(FakeBench):
        def linear(self, configs: list[LinearConfig], *rest: Any) -> list[Timing]:
            return [Timing(config, 10.0 + 0.1 * i, 1.7e-3) for i, config in enumerate(configs)]

    monkeypatch.setattr(FakeBench, "made", [], raising=False)
    monkeypatch.setattr(tune_bench, "Bench", Even)
    monkeypatch.setattr(tune_layers, "LayerBench", FakeLayers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=H200_SMS)
    )
    path = tmp_path / "table.json"
    assert cli.main(["tune", "--in-layers", "--layers", "o", "--tokens", "32", "-o", str(path)]) == 0
    tuning.read_table.cache_clear()
    place, job = (4096, 4096, 32), Job("o", 4096, 4096, 32)
    kept = tuning.read_table(path, "linear_int8")[place]
    tried = tune_layers.finalists(Even(1, 1, 1, 1, torch.int8).linear(linear_configs(job, H200_SMS)), job, H200_SMS)
    programs = {config: tuning.work_split(config, 32, 4096, 4096, H200_SMS).programs for config in tried}
    assert kept.max_registers == 72 and programs[kept] == min(programs.values()) < max(programs.values())
    assert tried[0] == tuning.linear_config(32, 4096, 4096, H200_SMS, int8=True)
    shown = capsys.readouterr().out
    assert (
        shown.count("us a layer with adapters") == len(tried) == len(set(tried)) > 4
        and shown.count("(as it was)") == 1
        and "kept: gluon" in shown
    )


def test_an_entry_on_trial_is_gone_afterwards() -> None:
    place, config = (4096, 4096, 32), LinearConfig("gluon", 64, 32, stages=3)
    before = tuning.linear_config(32, 4096, 4096, H200_SMS, int8=True)
    with tuning.instead("linear_int8", place, config):
        assert tuning.linear_config(32, 4096, 4096, H200_SMS, int8=True) == config
        assert tuning.linear_config(64, 4096, 4096, H200_SMS, int8=True) != config
    assert tuning.linear_config(32, 4096, 4096, H200_SMS, int8=True) == before


def test_replays_take_turns() -> None:
    order: list[str] = []
    times = {"a": iter([9.0, 1.0, 3.0, 2.0]), "b": iter([9.0, 6.0, 4.0, 5.0])}

    def replay(name: str) -> float:
        order.append(name)
        return next(times[name])

    assert tune_bench.take_turns([lambda: replay("a"), lambda: replay("b")], repeats=3) == [2.0, 5.0]
    assert order == ["a", "b"] * 4


def test_of_equally_fast_ones_the_most_exact_is_chosen() -> None:
    fast, exact, slow = (LinearConfig("wide", promote=promote) for promote in (0, 4, 2))
    measured = [Timing(fast, 10.0, 2.5e-3), Timing(exact, 10.2, 1.7e-3), Timing(slow, 11.0, 1.6e-3)]
    assert choose(measured).config is exact


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, job = tmp_path / "table.json", Job("down", 4096, 14336, 128, "fp8")
    first, second = (
        tuning.wide_config(128, 64, 2, promote=4),
        LinearConfig("gluon", 64, 32, stages=8, ctas=128, split=True, max_registers=72),
    )
    table: dict[str, Any] = {"device": "NVIDIA H200", "models": ["m"]}
    set_entry(table, "linear_8bit", job, first)
    set_entry(table, "linear_8bit", Job("down", 4096, 14336, 32, "fp8"), second)
    set_entry(table, "linear_8bit", Job("lm_head", 128256, 4096, 128, "fp8"), LinearConfig("scaled_mm"))
    set_entry(table, "linear_8bit_silu_mul", job, second)
    set_entry(table, "linear_8bit_silu_mul", job, None)
    write(path, table)
    assert tuning.read_table(path, "linear_fp8") == {
        (4096, 14336, 32): second,
        (4096, 14336, 128): first,
        (128256, 4096, 128): LinearConfig("scaled_mm"),
    }
    assert (
        tuning.read_table(path, "linear_fp8_silu_mul") == {} and json.loads(path.read_text())["device"] == "NVIDIA H200"
    )


def test_the_packages_table_is_written_as_tune_writes_it(tmp_path: Path) -> None:
    write(tmp_path / "again.json", json.loads(tuning.TUNED.read_text()))
    assert (tmp_path / "again.json").read_text() == tuning.TUNED.read_text()
