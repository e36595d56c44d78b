"""The exactness lab, without a GPU: its launches are the engine's, and it reports other bits and failures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.ops.attention import decode_gluon
from sidestream.ops.linear.linear_8bit import reference
from sidestream.tools.dev.bench import exactness_lab as lab


def test_dry_run_lists_the_cases_of_every_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.main(["--dry-run", "--shape", "llama-3.1-8b", "qwen3-8b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [sum(line.startswith(name) for line in lines) for name in lab.QUESTIONS] == [
        4,
        7,
        16,
        8,
    ]  # two shapes are the same
    assert lab.main(["--dry-run", "--only", "prompt"]) == 0
    assert "prompt  chunks of 512, widened" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", lab.batches(4096))
def test_without_forced_constants_the_decode_launch_is_the_engines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = lab.batches(4096)[name]
    seen: list[Any] = []

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **constants: seen.append((grid, [*map(plain, args)], constants))

    def plain(each: Any) -> Any:
        return each.tolist() if isinstance(each, torch.Tensor) and each.dtype == torch.int32 else type(each)

    monkeypatch.setattr(decode_gluon, "decode_kernel", Recorder())
    cache = lab.random_cache(2, "cpu")
    rows = len(batch.contexts) * batch.rows
    q, out = torch.zeros(rows, lab.HEADS, lab.HEAD_DIM), torch.zeros(rows, lab.HEADS * lab.HEAD_DIM)
    table = torch.zeros(len(batch.contexts), 200, dtype=torch.int32)
    lab.launch_decode(q, cache, table, batch, lab.constants_of(batch, 200, {}, q.device), out)
    lens = torch.tensor(batch.contexts, dtype=torch.int32)
    starts = torch.arange(0, rows + 1, batch.rows, dtype=torch.int32)
    scale = lab.HEAD_DIM**-0.5
    decode_gluon.launch(q, *cache, table, lens, scale, out, False, query_start=starts, rows=batch.rows)
    own, engines = seen
    if batch.rows == 1:  # then no row reads the starts
        own[1][5] = engines[1][5]
    assert own == engines


def test_chunks_of_the_reference_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "HEADS", 8)
    for chunk, widened in ((17, False), (160, True)):
        assert lab.measure_prompt(200, chunk, widened, "cpu") == {"rows": 0.0, "values": 0.0, "largest": 0.0}


def test_kernels_with_other_bits_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(config: Any, *args: Any, sms: int) -> None:
        out = args[-1]
        q, scale, weight, weight_scale, delta, residual = args[:-1]
        out.copy_(reference(q, scale, weight, weight_scale, delta, residual, out.dtype))
        if config.kernel == "triton":
            out[-1, 0] += 1
        if config.kernel == "wide":
            raise ValueError("no registers")

    monkeypatch.setattr(lab, "launch_config", launch)
    found = lab.measure_linear(256, 128, (1, 80), "cpu")
    assert found["equal"]["gluon"] > 0 and found["equal"]["large"] > 0 and found["equal"]["triton"] == 0
    assert found["different"] and all(each["config"].startswith("triton") for each in found["different"])
    assert found["different"][0]["largest"] == pytest.approx(1, rel=0.02)
    assert found["failed"] and set(found["failed"].values()) == {"ValueError: no registers"}


def test_products_are_grouped_by_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lab.measure_cublas(8, 16, "cpu", (1, 4, 32))
    assert found["in other places"].keys() == found["beside other rows"].keys() == {1, 4, 32}
    assert sorted(count for each in found["numbers of rows with the same bits"] for count in each) == [1, 4, 32]
    got = torch.ones(4, 8, dtype=torch.bfloat16)
    other = got.clone()
    other[2, :2] = 3
    assert lab.difference(got, got)["rows"] == 0
    assert lab.difference(other, got) == {"rows": 0.25, "values": 2 / 32, "largest": 2.0}


def test_a_failure_and_the_end_of_time_leave_the_other_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    cases = [("decode", "first", fail), ("linear", "second", lambda: {"equal": 3})]
    report = lab.run_cases(cases, 1e9, tmp_path / "out.json")
    assert [row.get("error") for row in report["rows"]] == ["RuntimeError: no such kernel", None]
    assert json.loads((tmp_path / "out.json").read_text())["rows"][1]["equal"] == 3
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert "left out after 0 seconds" in str(lab.run_cases(cases, 0, None)["rows"][1])
