"""A program's steps as one replay on this machine took them, and what its kernels take of a GPU: the measured side
of a dump.
"""

import itertools
from collections.abc import Iterable

import torch
from tqdm import tqdm

from ...compiler.api import CompiledModel
from ...compiler.cost.bytes_and_flops import Assumptions
from ...compiler.cost.estimate import Placed
from ...compiler.cost.kernel_resources import Resources, program_resources
from ...compiler.cost.timings import Timings
from ...compiler.inspect.profile import capture_profile
from ...compiler.program.program import Bucket
from ...compiler.run.bound_program import BoundProgram
from ..bench.random_model import random_tensors

REPLAYS = 5


def measured_timings(
    compiled: CompiledModel, buckets: Iterable[Bucket], device: torch.device, replays: int = REPLAYS
) -> Timings:
    """Runs each bucket's program with random weights and inputs.

    On a GPU: the replay of a CUDA graph of median length, kernel by kernel. On the CPU: the reference ops one after the
    other. Raises OutOfMemoryError when the device can't hold the model.
    """
    known: dict[str, torch.Tensor] = {}
    steps: dict[str, list[tuple[float, float]]] = {}
    for bucket in buckets:
        program = compiled.program(bucket)
        bound = BoundProgram(program, random_tensors(program, device, Assumptions(), known), device)
        steps[program.name] = [(place.start, place.end) for place in _one_run(bound, replays)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Timings(steps=steps, device=name)


def kernel_resources(compiled: CompiledModel, buckets: Iterable[Bucket], show_progress: bool = True) -> Resources:
    """What the kernels that these programs launch take of the GPU at hand, or of a Hopper where there is none."""
    programs = [compiled.program(bucket) for bucket in buckets]
    return program_resources(
        programs,
        lambda launches: tqdm(
            launches, desc="Compiling kernels", unit="launch", disable=not show_progress, leave=False
        ),
    )


def _one_run(bound: BoundProgram, replays: int) -> list[Placed]:
    if bound.device.type == "cuda":
        runs = sorted(capture_profile(bound, replays), key=lambda placed: max(place.end for place in placed))
        return runs[len(runs) // 2]
    ends = [0.0]
    for seconds in bound.step_times(replays):
        ends.append(ends[-1] + seconds)
    return [Placed(start, end) for start, end in itertools.pairwise(ends)]
