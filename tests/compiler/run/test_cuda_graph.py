"""What runs once before a capture: one launch of each kind, and always those whose results may be used as indices."""

import pytest
import torch
from sidestream.compiler.program.buffers import Buffer, View
from sidestream.compiler.program.program import Program, Step
from sidestream.compiler.run import cuda_graph as module
from sidestream.compiler.run.cuda_graph import first_runs, forget_first_runs

SHAPE, STRIDE = (4, 8), (8, 1)


@pytest.fixture(autouse=True)
def nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_made", set())


def program(*steps: tuple[object, ...], dtype: torch.dtype = torch.float32) -> Program:
    """x -> y through steps of the given further arguments."""
    buffers = (
        Buffer("x", "input", SHAPE, dtype),
        Buffer("y", "output", SHAPE, dtype),
        Buffer("z", "output", (40,), torch.float32),
    )
    views = View("x", SHAPE, STRIDE), View("y", SHAPE, STRIDE)
    return Program(
        None,
        buffers,
        tuple(Step(i, f"s{i}", "aten.relu.default", (views[0], *more), (views[1],)) for i, more in enumerate(steps)),
        0,
        (),
    )


def tensors(made: Program) -> dict[str, torch.Tensor]:
    return {buffer.name: torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in made.buffers}


def test_one_of_each_kind_runs_once() -> None:
    made = program((1,), (1,), (1.0,), (True,), (1,), ("a",))
    assert first_runs(made, tensors(made), "gpu") == [0, 2, 3, 5]
    again = program((2,), (1,))
    assert first_runs(again, tensors(again), "gpu") == [0]
    assert first_runs(again, tensors(again), "another") == [0, 1]
    forget_first_runs()
    assert first_runs(made, tensors(made), "gpu") == [0, 2, 3, 5]


def test_layout_and_alignment_count() -> None:
    whole, shifted, narrow = View("z", SHAPE, STRIDE), View("z", SHAPE, STRIDE, 1), View("z", (4, 4), STRIDE)
    made = program((whole,), (shifted,), (narrow,), (View("z", SHAPE, STRIDE, 4),))
    assert first_runs(made, {**tensors(made), "z": torch.empty(64)[:40]}, "gpu") == [0, 1, 2]


def test_whole_numbers_are_always_made() -> None:
    made = program((), (), dtype=torch.int32)
    assert first_runs(made, tensors(made), "gpu") == [0, 1]
    assert first_runs(made, tensors(made), "gpu") == [0, 1]
