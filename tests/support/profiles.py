"""A profiler's trace made by hand: a program of five steps on two lanes, run step by step once and replayed twice."""

from typing import Any

from sidestream.compiler.program.program import Program, Step
from sidestream.compiler.run.profiler_ranges import replay_range, step_range


def program() -> Program:
    steps = (
        Step(0, "plan", "aten.a.default", (), (), "side", records=True),
        Step(1, "norm", "aten.b.default", (), (), "main", records=True),
        Step(2, "shrink", "aten.c.default", (), (), "side", waits=(1,), records=True),
        Step(3, "linear", "aten.d.default", (), (), "main"),
        Step(4, "join", "aten.b.default", (), (), "main", waits=(2,)),
    )
    return Program(None, (), steps, 0, ())


KERNELS = {0: ["plan"], 1: ["norm"], 2: ["shrink", "merge"], 3: ["linear"], 4: ["norm"]}
# name, start us, end us within a replay
REPLAY = [("plan", 0, 2), ("norm", 0, 3), ("linear", 4, 20), ("shrink", 5, 8), ("merge", 8, 10), ("norm", 19, 23)]


def trace(replay: list[tuple[str, int, int]]) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    correlation, clock = 0, 1000.0

    def launch(kernels: list[tuple[str, float, float]], begin: float) -> None:
        nonlocal correlation
        correlation += 1
        events.append(
            {
                "ph": "X",
                "cat": "cuda_driver",
                "name": "cuLaunchKernelEx",
                "ts": begin,
                "dur": 1.0,
                "tid": 7,
                "args": {"correlation": correlation},
            }
        )
        for name, start, end in kernels:
            about = {"stream": 13, "correlation": correlation}
            events.append(
                {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "tid": 13, "args": about}
            )

    def mark(name: str, start: float, end: float) -> None:
        events.append({"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "tid": 7})

    made = program()
    for step in made.steps:
        begin = clock
        for name in KERNELS[step.index]:
            launch([(name, clock + 50, clock + 52)], clock + 1)
            clock += 10
        mark(step_range(made, step), begin, clock - 1)
    for _ in range(2):
        launch([(name, clock + 5 + start, clock + 5 + end) for name, start, end in replay], clock + 1)
        mark(replay_range(made), clock, clock + 4)
        clock += 100
    launch([("elsewhere", clock + 50, clock + 51)], clock)
    events.append(
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy HtoD",
            "ts": clock + 60,
            "dur": 2,
            "tid": 14,
            "args": {"stream": 14, "correlation": 999},
        }
    )
    mark("batcher schedule", clock + 70, clock + 80)
    return {"traceEvents": [*reversed(events), {"ph": "M", "name": "process_name"}]}
