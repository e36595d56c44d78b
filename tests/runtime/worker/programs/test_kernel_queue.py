"""Processes compile the kernels of a start's programs, each once, and launches find them in Triton's cache."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sidestream.compiler.run.compile_once import LOCK_FILE
from sidestream.ops.core.triton_support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

MODEL = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from sidestream.compiler.api import compile_model
from sidestream.compiler.cost.machine_code import HOPPER, launches_become
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.pipeline import pass_names
from sidestream.compiler.program.cache import LIMIT, ProgramCache
from sidestream.compiler.program.cache_folder import CacheFolder
from sidestream.compiler.program.calls import own_op
from sidestream.compiler.program.program import Bucket
from sidestream.compiler.run.bound_program import BoundProgram
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from sidestream.ops.collectives.exchange import PURPOSE, Exchange, exchange_bytes
from sidestream.ops.collectives.tensor_parallel_group import RankGroup, register_group
from sidestream.runtime.worker.programs.kernel_queue import KernelQueue
from sidestream.runtime.worker.programs.program_processes import ProgramProcesses
from sidestream.runtime.worker.step_inputs import StepInputs
from sidestream.tools.bench.random_model import TINY
from triton import knobs
from triton.runtime.jit import JITFunction

ranks = int(sys.argv[3])
if ranks > 1:  # the group of rank 1, as a start has joined it
    memories = tuple(torch.zeros(exchange_bytes(ranks), dtype=torch.uint8) for _ in range(ranks))
    register_group(RankGroup(f"tp{ranks}", 1, ranks, buffers={PURPOSE: Exchange(1, memories)}))
options = CompileOptions(precision="int8", tensor_parallel=ranks, tensor_parallel_rank=int(ranks > 1))
cache = ProgramCache(CacheFolder(Path(sys.argv[1]), LIMIT), {"config": "tiny"}, options, pass_names())
config = LlamaConfig.from_dict(TINY | {"num_hidden_layers": 1})
llama = Llama(config, LoraShape(slots=2, rank=16), dtype=options.model_dtype, device="meta")
model = compile_model(llama, options, cache=cache, text=False)
buckets = [Bucket(64, 8, 7, 4), Bucket(1, 1, 7, 4, decode=True)]
later = Bucket(64, 64, 7, 4)
"""
COMPILE = """
model.program(later)  # captures the model before the processes are forked
compiled = []

def listen(*, src, cache_hit, **_):
    os.write(log, f"{src.name} {cache_hit}\\n".encode())

log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
knobs.compilation.listener = listen
missing = model.missing_programs([*buckets, replace(later, lora=False)])
queues = [KernelQueue([bucket], model.saved, HOPPER) for bucket in missing[:-1]]
with ProgramProcesses(missing, model.keep, 2, queues) as processes:
    for number in (1, 2):
        processes.wait_for_kernels(number)
        print(Path(sys.argv[2]).read_text().count("\\n"))
print(len(model.missing_programs([*missing, later])))
"""
LAUNCH = """
seen = []
run = JITFunction.run
knobs.compilation.listener = lambda *, src, cache_hit, **_: seen.append((src.name, cache_hit))
launch = lambda kernel, *args, **kwargs: run(kernel, *args, **{**kwargs, "warmup": True})
for bucket in buckets:
    program = model.program(replace(bucket, pages=33))
    given = [each for each in program.buffers if each.kind != "temp"]
    tensors = {each.name: torch.empty_strided(each.shape, each.strides, dtype=each.dtype) for each in given}
    bound = BoundProgram(program, tensors | StepInputs(program, torch.device("cpu")).tensors)
    for step in program.steps:
        op = own_op(step.op)
        if op is not None:
            with launches_become(launch, HOPPER), patch.object(torch, "_scaled_mm", lambda *_, out, **__: out):
                arguments = bound.arguments(step.index)
                op.launch(*arguments, out=bound.outs[step.index], sm_budget=step.sm_budget, pdl=step.pdl)
print(json.dumps(seen))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_launches_find_all_kernels_compiled_once(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processes of two starts at the same time. Launches have other addresses and another number of pages."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    starts = [begin(COMPILE, tmp_path / name, tmp_path / f"{name}.log", ranks) for name in ("first", "second")]
    compiled: list[str] = []
    for start, name in zip(starts, ("first", "second"), strict=True):
        first, counted, missing = output(start).splitlines()
        lines = (tmp_path / f"{name}.log").read_text().splitlines()
        assert 0 < int(first) <= int(counted) == len(lines), "all are compiled when the wait ends"
        assert missing == "0", "later programs are built, too"
        compiled += [line.split()[0] for line in lines if line.endswith("False")]
    kernels = [path for path in (tmp_path / "triton").iterdir() if path.name != LOCK_FILE]
    assert len(compiled) == len(kernels), "none is compiled twice"
    launched: list[tuple[str, bool]] = json.loads(output(begin(LAUNCH, tmp_path / "first", "", ranks)))
    assert [kernel for kernel, was_cached in launched if not was_cached] == []
    assert sorted(kernel for kernel, _ in launched) == sorted(compiled)


def begin(script: str, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MODEL + script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    return printed
