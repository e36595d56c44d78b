"""Random programs on two streams, for tests of the scheduler and the memory plan."""

import random
from collections.abc import Sequence

import torch
from sidestream.compiler.program.buffers import Buffer, View
from sidestream.compiler.program.lower import Operation
from sidestream.compiler.program.memory import plan_memory
from sidestream.compiler.program.program import Program, Step
from sidestream.compiler.program.schedule import schedule


def view(name: str, size: int) -> View:
    return View(name, (size,), (1,))


def random_operations(rng: random.Random, length: int) -> tuple[dict[str, Buffer], list[Operation]]:
    """Operations with 1-2 results each, reading results of earlier ones; some overwrite a shared cache in place."""
    buffers = {"cache": Buffer("cache", "input", (64,), torch.uint8), "x": Buffer("x", "input", (64,), torch.uint8)}
    known = ["x"]
    operations = []
    for index in range(length):
        sources = rng.sample(known, min(len(known), rng.randint(1, 3)))
        results = [f"t{index}.{number}" for number in range(rng.randint(1, 2))]
        for name in results:
            buffers[name] = Buffer(name, "temp", (rng.choice([0, 1, 100, 256, 700, 3000]),), torch.uint8)
        writes = [*results, *(["cache"] if rng.random() < 0.15 else [])]
        reads = [*sources, *(["cache"] if rng.random() < 0.3 or "cache" in writes else [])]
        outs = tuple(view(name, buffers[name].shape[0]) for name in results)
        arguments = tuple(view(name, buffers[name].shape[0]) for name in reads)
        op = "sidestream.fake" if rng.random() < 0.8 else "aten.fake.default"
        operations.append(
            Operation(f"op{index}", op, arguments, (), outs, frozenset(reads), frozenset(writes), rng.random() < 0.45)
        )
        known.extend(results)
        if len(known) > 8:
            known.pop(rng.randrange(len(known)))
    return buffers, operations


def mutations(operations: Sequence[Operation], steps: Sequence[Step]) -> dict[int, list[View]]:
    """What each step writes besides its results."""
    by_name = {operation.name: operation for operation in operations}
    return {step.index: [view("cache", 64)] if "cache" in by_name[step.name].writes else [] for step in steps}


def build(seed: int, length: int = 40, two_streams: bool = True) -> tuple[Program, list[Operation]]:
    """A scheduled, planned random program and the operations that it is made of."""
    buffers, operations = random_operations(random.Random(seed), length)
    steps = schedule(operations, two_streams=two_streams)
    planned, arena = plan_memory(buffers, steps)
    return Program(None, planned, steps, arena, ()), operations


def reachable(steps: Sequence[Step], dropped: tuple[int, int] | None = None) -> list[set[int]]:
    """Steps that have finished before each step starts, by walking stream order and waits (without the wait
    `dropped` = (step, wait)).
    """
    result: list[set[int]] = []
    last: dict[str, int] = {}
    for step in steps:
        sources = [wait for wait in step.waits if (step.index, wait) != dropped]
        if step.stream in last:
            sources.append(last[step.stream])
        result.append(set(sources).union(*(result[source] for source in sources)))
        last[step.stream] = step.index
    return result
