"""Excerpts of docs/internals.md: layer 0 of a small model, as the compiler sees it. tables.py writes them."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ....compiler.api import CompiledModel, compile_model
from ....compiler.cost.bytes_and_flops import step_bytes
from ....compiler.cost.estimate import estimate
from ....compiler.pass_records import columns
from ....compiler.program.buffers import short_dtype
from ....compiler.program.layers import step_layers
from ....compiler.program.program import Bucket, Program
from ....graphs.config import LlamaConfig
from ....graphs.llama import Llama, RMSNorm
from ....graphs.lora import LoRALinear, LoraShape

CONFIG = LlamaConfig(512, 256, 512, 3, 4, 2, 64)
DECODE = Bucket(tokens=8, sequences=8, pages=65, blocks=8, decode=True)


@cache
def compiled() -> CompiledModel:
    """Return the model of the page: three layers, slots for four adapters of rank 16."""
    return compile_model(Llama(CONFIG, LoraShape(slots=4, rank=16), device="meta"))


@cache
def program() -> Program:
    """Return its program for eight decoding sequences."""
    return compiled().program(DECODE)


def source(thing: Any) -> str:
    """Return the source text of a function or class."""
    return inspect.cleandoc("\n" + inspect.getsource(thing)) + "\n"


def layer_after(name: str, module: str = "", start: bool = False) -> str:
    """Return layer 0's graph lines after pass `name` (`start`: before it); `module`: part of their module's path."""
    record = next(each for each in compiled().records if each.name == name)
    lines = record.lines_before if start else record.lines_after
    chosen = (line for line in lines if line.layer == 0 and not line.parameter and module in line.module)
    return "".join(f"{_shorter(line.text)}\n" for line in chosen)


def _shorter(text: str) -> str:
    return re.sub(r"([pb]_)?model_layers_0_", "", text)


def passes() -> str:
    """Return the pass table without the changes of ops."""
    rows = [("pass", "tier", "matches", "rejected", "kernels")]
    for each in compiled().records:
        kernels = f"{sum(each.ops_before.values())} -> {sum(each.ops_after.values())}"
        rows.append((each.name, each.tier, str(each.matches), str(len(each.rejected)), kernels))
    return columns(rows, right=(2, 3))


def steps() -> str:
    """Return layer 0's steps, as in `program.txt`."""
    made, layers = program(), step_layers(program())
    rows = [("step", "lane", "op", "result", "waits for", "SMs", "PDL", "KB", "us")]
    for step, placed in zip(made.steps, estimate(made), strict=True):
        if layers[step.index] != 0:
            continue
        view = next((view for view in step.outs if 0 not in view.shape), None)
        dtype = "" if view is None else short_dtype(view.dtype or made.by_name[view.buffer].dtype)
        result = "in place" if view is None else f"{dtype}{list(view.shape)}"
        costs = f"{step_bytes(made, step) / 1e3:.1f}", f"{(placed.end - placed.start) * 1e6:.1f}"
        where = ", ".join(map(str, step.waits)), str(step.sm_budget or "all"), "yes" if step.pdl else ""
        rows.append((str(step.index), step.stream, step.op.removeprefix("sidestream."), result, *where, *costs))
    return columns(rows, right=(0, 7, 8))


def memory() -> str:
    """Return the offsets and lifetimes of layer 0's temporaries."""
    made, layers = program(), step_layers(program())
    rows = [("buffer", "dtype", "shape", "offset", "bytes", "steps")]
    for each in made.of_kind("temp"):
        if each.nbytes and layers[each.life[0]] == 0:
            place = str(each.offset), str(each.nbytes), f"{each.life[0]}..{each.life[1]}"
            rows.append((each.name, short_dtype(each.dtype), str(list(each.shape)), *place))
    return columns(rows, right=(3, 4)) + f"\narena: {made.arena_bytes} bytes for all layers\n"


EXCERPTS: Mapping[str, Callable[[], str]] = {
    "source of the norm": lambda: source(RMSNorm.forward),
    "source of a projection": lambda: source(LoRALinear.forward),
    "captured norm": lambda: layer_after("normalize", "input_layernorm", start=True),
    "lifted": lambda: layer_after("lift_lora", "self_attn"),
    "fused": lambda: layer_after("fuse_rope_append"),
    "quantized": lambda: layer_after("fuse_quantize"),
    "passes": passes,
    "steps": steps,
    "memory": memory,
}
