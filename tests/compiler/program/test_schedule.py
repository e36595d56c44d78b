"""Two streams: forks, joins, SM budgets, PDL; and for random programs, that waits are enough and none is
superfluous.
"""

from collections.abc import Sequence

import pytest
from sidestream.compiler.program.lower import Operation
from sidestream.compiler.program.program import Step
from sidestream.compiler.program.schedule import clocks, dependencies, schedule
from support.two_lanes import build, mutations, reachable


def op(
    name: str,
    reads: str = "",
    writes: str = "",
    side: bool = False,
    share: float | None = None,
    library: str = "sidestream",
) -> Operation:
    return Operation(
        name,
        f"{library}.{name}",
        (),
        (),
        (),
        frozenset(reads.split()),
        frozenset((writes or name).split()),
        side,
        share,
    )


def lora_layer(share: float = 0.25) -> list[Operation]:
    """One LoRA point as the passes leave it: the base GEMM first in the graph, then shrink and expand, then the
    consumer.
    """
    return [
        op("norm", "x"),
        op("gemm", "norm"),
        op("shrink", "norm", side=True, share=share),
        op("expand", "shrink", side=True, share=share),
        op("append", "gemm expand"),
        op("attention", "append"),
    ]


def named(steps: Sequence[Step]) -> dict[str, Step]:
    return {step.name: step for step in steps}


def test_a_lora_point_is_one_fork_and_one_join() -> None:
    steps = schedule(lora_layer(), two_streams=True)
    by_name = named(steps)
    # the fork comes before the base GEMM
    assert [step.name for step in steps] == ["norm", "shrink", "expand", "gemm", "append", "attention"]
    assert {step.name: [steps[wait].name for wait in step.waits] for step in steps if step.waits} == {
        "shrink": ["norm"],
        "append": ["expand"],
    }
    assert [step.name for step in steps if step.records] == ["norm", "expand"]
    assert by_name["shrink"].stream == by_name["expand"].stream == "side"


def test_sm_budgets_are_shared_only_where_lanes_overlap() -> None:
    steps = named(schedule(lora_layer(), two_streams=True, sm_count=132))
    assert {name: step.sm_budget for name, step in steps.items()} == {
        "norm": None,
        "shrink": 33,
        "expand": 33,
        "gemm": 99,
        "append": None,
        "attention": None,
    }
    half = named(schedule(lora_layer(share=0.5), two_streams=True, sm_count=114))
    assert half["shrink"].sm_budget == half["gemm"].sm_budget == 57


def test_without_a_share_nobody_is_limited() -> None:
    unlimited = [op(each.name, " ".join(each.reads), " ".join(each.writes), side=each.side) for each in lora_layer()]
    assert {step.sm_budget for step in schedule(unlimited, two_streams=True)} == {None}
    assert named(schedule(unlimited, two_streams=True, side_share=0.25))["gemm"].sm_budget == 99


def test_pdl_chains_neighbours_but_not_the_fork() -> None:
    steps = named(schedule(lora_layer(), two_streams=True))
    assert {name for name, step in steps.items() if step.pdl} == {"expand", "gemm", "append", "attention"}
    assert not any(step.pdl for step in schedule(lora_layer(), two_streams=True, pdl=False))


def test_pdl_and_budgets_leave_foreign_ops_alone() -> None:
    operations = [op("a", "x"), op("b", "a", library="aten"), op("c", "b"), op("d", "c")]
    assert [step.pdl for step in schedule(operations, two_streams=False)] == [False, False, False, True]
    together = [op("s", "x", side=True), op("m", "x", library="aten"), op("n", "m s")]
    assert named(schedule(together, two_streams=True))["m"].sm_budget is None


def test_serial_lowering_uses_one_stream_in_graph_order() -> None:
    steps = schedule(lora_layer(), two_streams=False)
    assert [step.name for step in steps] == [operation.name for operation in lora_layer()]
    assert all(
        step.stream == "main" and not step.waits and not step.records and step.sm_budget is None for step in steps
    )


def test_a_wait_implied_by_an_earlier_one_is_left_out() -> None:
    operations = [
        op("a", "x"),
        op("b", "a"),
        op("s1", "b", side=True),
        op("s2", "a", side=True),
        op("c", "s2"),
        op("d", "s1 c"),
    ]
    steps = schedule(operations, two_streams=True)
    waits = {step.name: [steps[wait].name for wait in step.waits] for step in steps if step.waits}
    assert waits == {"s1": ["b"], "c": ["s2"]}  # s2 follows s1 on its stream; d follows c


def test_mutations_keep_the_graphs_order() -> None:
    operations = [
        op("append", "kv", "kv"),
        op("reader", "kv", side=True),
        op("second", "kv x", "kv"),
        op("late", "kv reader"),
    ]
    assert dependencies(operations) == [set(), {0}, {0, 1}, {2, 1}]
    steps = schedule(operations, two_streams=True)
    assert [steps[wait].name for wait in named(steps)["second"].waits] == ["reader"]


def test_side_steps_without_main_inputs_start_at_once() -> None:
    steps = schedule(
        [op("embedding", "x"), op("plan", "adapter_index", side=True), op("norm", "embedding plan")], two_streams=True
    )
    assert steps[0].name == "plan" and not steps[0].waits


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_wait_enough_and_not_more(seed: int) -> None:
    program, operations = build(seed)
    steps = program.steps
    place = {step.name: step.index for step in steps}
    edges = [(source, target) for target, sources in enumerate(dependencies(operations)) for source in sources]
    needed = [(place[operations[source].name], place[operations[target].name]) for source, target in edges]
    before = reachable(steps)
    assert all(source in before[target] for source, target in needed)
    for step in steps:
        for wait in step.waits:
            without = reachable(steps, dropped=(step.index, wait))
            assert any(source not in without[target] for source, target in needed), (
                f"wait {wait} of step {step.index} changes nothing"
            )
    assert {wait for step in steps for wait in step.waits} == {step.index for step in steps if step.records}


@pytest.mark.parametrize("seed", range(20))
def test_clocks_agree_with_reachability(seed: int) -> None:
    program, operations = build(seed, length=25)
    timing, before = clocks(program.steps), reachable(program.steps)
    for second in range(len(program.steps)):
        assert {first for first in range(len(program.steps)) if timing.before(first, second)} == before[second]
    assert mutations(operations, program.steps).keys() == set(range(len(program.steps)))


@pytest.mark.parametrize("seed", range(20))
def test_each_stream_keeps_the_graphs_order_and_main_is_not_delayed(seed: int) -> None:
    program, operations = build(seed)
    graph = {operation.name: index for index, operation in enumerate(operations)}
    for stream in ("main", "side"):
        order = [graph[step.name] for step in program.steps if step.stream == stream]
        assert order == sorted(order)
