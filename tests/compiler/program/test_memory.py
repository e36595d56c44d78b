"""The arena: no two buffers that may be alive at once share bytes, and the checker finds it when they do."""

import dataclasses
import random

import pytest
import torch
from sidestream.compiler.program.buffers import Buffer
from sidestream.compiler.program.memory import ALIGNMENT, accesses, plan_memory, unshared_bytes
from sidestream.compiler.program.program import Program, Step
from support.races import find_races
from support.two_lanes import build, mutations, reachable, view


def step(
    index: int,
    reads: str,
    writes: str,
    stream: str = "main",
    waits: tuple[int, ...] = (),
    records: bool = False,
    size: int = 512,
) -> Step:
    arguments, outs = (tuple(view(name, size) for name in names.split()) for names in (reads, writes))
    return Step(index, f"s{index}", "sidestream.fake", arguments, outs, stream, waits, records)  # type: ignore[arg-type]


def temps(*names: str, size: int = 512) -> dict[str, Buffer]:
    return {
        "x": Buffer("x", "input", (size,), torch.uint8),
        **{name: Buffer(name, "temp", (size,), torch.uint8) for name in names},
    }


def planned(steps: tuple[Step, ...], *names: str) -> Program:
    buffers, arena = plan_memory(temps(*names), steps)
    return Program(None, buffers, steps, arena, ())


def moved(program: Program, **offsets: int) -> Program:
    buffers = tuple(
        dataclasses.replace(buffer, offset=offsets[buffer.name]) if buffer.name in offsets else buffer
        for buffer in program.buffers
    )
    return dataclasses.replace(program, buffers=buffers)


CHAIN = (step(0, "x", "a"), step(1, "a", "b"), step(2, "b", "c"), step(3, "c", "d"))
# a -> (side: s reads a) while (main: b, c), joined by d
FORKED = (
    step(0, "x", "a", records=True),
    step(1, "a", "s", "side", (0,), True),
    step(2, "x", "b"),
    step(3, "b", "c"),
    step(4, "c s", "d", waits=(1,)),
    step(5, "d", "e"),
)


def test_a_chain_needs_two_buffers() -> None:
    program = planned(CHAIN, "a", "b", "c", "d")
    assert program.arena_bytes == 1024
    assert unshared_bytes(program) == 2048
    assert find_races(program, {}) == []
    assert (
        program.by_name["b"].life == (1, 2)
        and program.by_name["x"].life == (0, 0)
        and program.by_name["x"].offset is None
    )


def test_memory_that_the_other_stream_still_reads_is_not_reused() -> None:
    program = planned(FORKED, "a", "s", "b", "c", "d", "e")
    offset = {buffer.name: buffer.offset for buffer in program.buffers}
    assert offset["a"] not in (offset["b"], offset["c"])  # s may still read a
    assert find_races(program, {}) == []
    assert program.arena_bytes == 4 * 512


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_have_no_races(seed: int) -> None:
    program, operations = build(seed)
    assert find_races(program, mutations(operations, program.steps)) == []
    assert all(buffer.offset is not None and buffer.offset % ALIGNMENT == 0 for buffer in program.of_kind("temp"))
    assert program.arena_bytes <= unshared_bytes(program)


@pytest.mark.parametrize("seed", range(30))
def test_bytes_overlap_only_between_ordered_lives(seed: int) -> None:
    """The same property from the definition, without the checker."""
    program, _ = build(seed, length=30)
    before, used = reachable(program.steps), accesses(program.steps)
    live = [buffer for buffer in program.of_kind("temp") if buffer.nbytes and buffer.name in used]
    for first in live:
        for second in live:
            apart = first.offset + first.nbytes <= second.offset or second.offset + second.nbytes <= first.offset  # type: ignore[operator]
            over = all(access in before[used[second.name][0]] for access in used[first.name])
            later = all(access in before[used[first.name][0]] for access in used[second.name])
            assert first is second or apart or over or later


def test_a_free_list_in_list_order_would_race() -> None:
    """Why the plan asks for happens-before: reuse by position in the list breaks random programs, and the checker
    says so.
    """
    caught = 0
    for seed in range(20):
        program, operations = build(seed)
        ends = accesses(program.steps)
        free: list[tuple[int, int, str]] = []
        offsets: dict[str, int] = {}
        top = 0
        for each in program.steps:
            for out in each.outs:
                size = 3072
                spot = next((entry for entry in free if ends[entry[2]][-1] < each.index), None)
                if spot is not None:
                    free.remove(spot)
                    offsets[out.buffer] = spot[0]
                else:
                    offsets[out.buffer], top = top, top + size
                free.append((offsets[out.buffer], size, out.buffer))
        naive = moved(dataclasses.replace(program, arena_bytes=max(top, program.arena_bytes)), **offsets)
        caught += bool(find_races(naive, mutations(operations, program.steps)))
    assert caught > 15


def test_the_checker_names_overlaps_missing_waits_and_unwritten_reads() -> None:
    program = planned(FORKED, "a", "s", "b", "c", "d", "e")
    clash = moved(program, b=program.by_name["a"].offset or 0)
    assert any(
        "s1 (side)" in problem and "s2 (main)" in problem and "overlap" in problem for problem in find_races(clash, {})
    )
    unjoined = dataclasses.replace(
        program, steps=tuple(dataclasses.replace(each, waits=()) if each.index == 4 else each for each in program.steps)
    )
    assert any("s1 (side) and step 4 s4 (main)" in problem for problem in find_races(unjoined, {}))
    unwritten = dataclasses.replace(program, steps=(dataclasses.replace(program.steps[0], outs=()), *program.steps[1:]))
    assert any("reads a, which no step before it has written" in problem for problem in find_races(unwritten, {}))


def test_the_checker_sees_values_overwritten_in_order() -> None:
    steps = (step(0, "x", "a"), step(1, "x", "b"), step(2, "a b", "c"))
    program = planned(steps, "a", "b", "c")
    clobbered = moved(program, b=program.by_name["a"].offset or 0)
    assert any("reads a, over which step 1 s1 (main) has written b" in problem for problem in find_races(clobbered, {}))


def test_the_checker_sees_unordered_mutations_and_missing_outputs() -> None:
    steps = (step(0, "x", "a"), step(1, "x", "s", "side"))
    program = planned(steps, "a", "s")
    assert find_races(program, {}) == []
    assert any("x (0, 512) and x (0, 512) overlap" in problem for problem in find_races(program, {0: [view("x", 512)]}))
    missing = dataclasses.replace(
        program, buffers=(*program.buffers, Buffer("y", "output", (4,), torch.uint8)), outputs=(view("y", 4),)
    )
    assert find_races(missing, {}) == ["the output y is written by no step"]


def test_nothing_to_place_takes_no_memory() -> None:
    assert plan_memory({"x": temps()["x"]}, ()) == ((Buffer("x", "input", (512,), torch.uint8),), 0)
    buffers, arena = plan_memory({"e": Buffer("e", "temp", (0, 8), torch.float32)}, ())
    assert arena == 0 and buffers[0].offset == 0


def test_a_chain_of_mixed_sizes_stays_near_its_widest_pair() -> None:
    rng = random.Random(1)
    sizes = {f"t{index}": rng.choice([256, 1024, 4096]) for index in range(24)}
    buffers = {
        "x": Buffer("x", "input", (1,), torch.uint8),
        **{name: Buffer(name, "temp", (size,), torch.uint8) for name, size in sizes.items()},
    }
    steps = tuple(
        Step(
            index,
            f"s{index}",
            "sidestream.fake",
            (view(f"t{index - 1}", sizes[f"t{index - 1}"]),) if index else (view("x", 1),),
            (view(name, size),),
        )
        for index, (name, size) in enumerate(sizes.items())
    )
    _, arena = plan_memory(buffers, steps)
    widest = max(sizes[f"t{index}"] + sizes[f"t{index + 1}"] for index in range(23))
    # neighbours in a chain are all that is ever alive together
    assert widest <= arena <= 1.5 * widest < sum(sizes.values())
