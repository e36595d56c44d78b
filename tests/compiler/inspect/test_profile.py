"""Traces read back: kernels belong to the step that launched them, also inside a replay."""

import pytest
from sidestream.compiler.inspect.profile import ProfileError, kernels_of_steps, ranges, replays
from support.profiles import KERNELS, REPLAY, program, trace


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    assert kernels_of_steps(program(), ranges(trace(REPLAY))) == {
        index: tuple(names) for index, names in KERNELS.items()
    }


def test_a_replay_is_told_apart_by_name_and_order() -> None:
    found = ranges(trace(REPLAY))
    placed = replays(program(), found, kernels_of_steps(program(), found))
    assert len(placed) == 2
    wanted = [(0, 2), (0, 3), (5, 10), (4, 20), (19, 23)]
    assert [(round(where.start * 1e6), round(where.end * 1e6)) for where in placed[1]] == wanted


def test_a_replay_of_other_kernels_is_refused() -> None:
    found = ranges(trace([*REPLAY[:-1], ("memset", 19, 23)]))
    with pytest.raises(ProfileError, match=r"missing \{'norm': 1\}, unexpected \{'memset': 1\}"):
        replays(program(), found, kernels_of_steps(program(), found))


def test_a_trace_without_the_program_is_refused() -> None:
    with pytest.raises(ProfileError, match="has 0 of the 5 steps"):
        kernels_of_steps(program(), ranges({"traceEvents": []}))
