"""The bench of a mixture's kernels, without a GPU: its cases are valid arguments, and wrong results are noticed."""

import pytest
import torch
from sidestream.ops.core.registry import as_outputs
from sidestream.tools.dev.bench.moe_kernels import Layer, Shape, main
from sidestream.tools.tuning.grouped import MAX_ERROR, error_of


def test_dry_run_lists_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--tokens", "64"]) == 0
    printed = capsys.readouterr().out
    assert "floor and share: at 4.68 TB/s (H200)" in printed
    floors = {line[7:23].strip(): float(line.split()[-1]) for line in printed.splitlines()[2:]}
    assert len(floors) == 14
    # 126 of 128 experts of 3.1 and 1.6 MB
    assert floors["gate_up"] == pytest.approx(85, rel=0.02) and floors["down"] == pytest.approx(43, rel=0.02)


@pytest.mark.parametrize("tokens", [1, 5])
def test_cases_are_arguments_of_their_ops(tokens: int) -> None:
    layer = Layer(Shape(64, 32, 4, 2, 2, 16), torch.int8, "cpu")
    for case in layer.cases(tokens):
        for args in (case.args[0], case.args[-1]):
            outs, fakes = as_outputs(case.op.reference(*args)), as_outputs(case.op.fake(*args))
            assert [(out.shape, out.dtype) for out in outs] == [(fake.shape, fake.dtype) for fake in fakes]
            assert all(out.float().isfinite().all() for out in outs), case.name


def test_wrong_results_are_noticed() -> None:
    right = torch.randn(64, 32)
    wrong = right.clone()
    wrong[3] = 0
    assert error_of(right, right) == 0 and error_of(wrong, right) > MAX_ERROR
    assert error_of(torch.full_like(right, float("nan")), right) == float("inf")
    places = torch.arange(50)
    assert error_of(places, places) == 0 and error_of(places.flip(0), places) > MAX_ERROR
