"""Keeps the excerpts in docs/internals.md true: regenerates each from a compilation, and compares or rewrites.

python -m sidestream.tools.dev.pages.internals            exit code 1 and a diff when an excerpt is out of date
python -m sidestream.tools.dev.pages.internals --write    put the excerpts of today in
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ....compiler.api import CompiledModel, compile_model
from ....compiler.cost.bytes_and_flops import step_bytes
from ....compiler.cost.estimate import critical_path, estimate
from ....compiler.pass_records import GraphLine, columns
from ....compiler.program.buffers import short_dtype
from ....compiler.program.layers import step_layers
from ....compiler.program.program import Bucket, Program
from ....compiler.run.bound_program import BoundProgram
from ....compiler.run.cuda_graph import capture
from ....graphs.config import LlamaConfig
from ....graphs.llama import Attention, DecoderLayer, Llama, RMSNorm
from ....graphs.lora import LoRALinear, LoraShape
from ..bench.estimated_changes import table as changes
from .excerpts import ExcerptError, keep_true

PAGE = Path(__file__).parents[3] / "docs" / "internals.md"
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
DECODE = Bucket(tokens=8, sequences=8, pages=65, blocks=8, decode=True)
LAYER = 0


@cache
def compiled() -> CompiledModel:
    """The model that the page walks through: three layers, room for four adapters of rank 16."""
    return compile_model(Llama(CONFIG, LoraShape(slots=4, rank=16), device="meta"))


def program() -> Program:
    """Its program for eight decoding sequences."""
    return compiled().program(DECODE)


def source(thing: Any) -> str:
    """A function's or class's source text."""
    return inspect.cleandoc("\n" + inspect.getsource(thing)) + "\n"


def layer_after(name: str, module: str = "", start: bool = False) -> str:
    """The graph's lines of layer 0 after pass `name` (`start`: before it), those of one module where a part of
    its path is given.
    """
    record = next((record for record in compiled().records if record.name == name), None)
    if record is None:
        raise ExcerptError(
            f"there is no pass {name!r} any more; passes: {', '.join(record.name for record in compiled().records)}"
        )
    lines = record.lines_before if start else record.lines_after
    return "".join(f"{_shorter(line.text)}\n" for line in _of_layer(lines) if module in line.module)


def _of_layer(lines: Sequence[GraphLine]) -> Iterator[GraphLine]:
    return (line for line in lines if line.layer == LAYER and not line.parameter)


def _shorter(text: str) -> str:
    return text.replace("p_model_layers_0_", "").replace("b_model_layers_0_", "").replace("model_layers_0_", "")


def recipes() -> str:
    """How layer 0's packed and quantized tensors come from the checkpoint's."""
    found = {**compiled().recipes, **compiled().adapter_recipes}
    chosen = [
        (name, recipe) for name, recipe in found.items() if any("layers.0." in source for source in recipe.sources())
    ]
    return "".join(
        f"{_shorter(name)}\n    = {str(recipe).replace('model.layers.0.', '')}\n"
        for name, recipe in chosen
        if "q_k_v" in name
    )


def passes() -> str:
    """The pass table without the ops that came and went."""
    rows = [("pass", "tier", "matches", "rejected", "kernels")]
    for record in compiled().records:
        before, after = sum(record.ops_before.values()), sum(record.ops_after.values())
        rows.append((record.name, record.tier, str(record.matches), str(len(record.rejected)), f"{before} -> {after}"))
    return columns(rows, right=(2, 3))


def steps() -> str:
    """Layer 0's steps, as `program.txt` has them."""
    made, layers = program(), step_layers(program())
    timing = estimate(made)
    rows = [("step", "lane", "op", "result", "waits for", "SMs", "PDL", "KB", "us")]
    for step, placed in zip(made.steps, timing, strict=True):
        if layers[step.index] == LAYER:
            view = next((view for view in step.outs if 0 not in view.shape), None)
            shape = (
                f"{short_dtype(view.dtype or made.by_name[view.buffer].dtype)}{list(view.shape)}"
                if view is not None
                else "in place"
            )
            name, waits = step.op.removeprefix("sidestream."), ", ".join(map(str, step.waits))
            kilobytes, taken = f"{step_bytes(made, step) / 1e3:.1f}", f"{(placed.end - placed.start) * 1e6:.1f}"
            rows.append(
                (
                    str(step.index),
                    step.stream,
                    name,
                    shape,
                    waits,
                    str(step.sm_budget or "all"),
                    "yes" if step.pdl else "",
                    kilobytes,
                    taken,
                )
            )
    return columns(rows, right=(0, 7, 8))


def memory() -> str:
    """Where layer 0's temporaries lie, and when."""
    made, layers = program(), step_layers(program())
    rows = [("buffer", "dtype", "shape", "offset", "bytes", "steps")]
    for buffer in made.of_kind("temp"):
        if buffer.nbytes and layers[buffer.life[0]] == LAYER:
            shape = str(list(buffer.shape))
            rows.append(
                (
                    buffer.name,
                    short_dtype(buffer.dtype),
                    shape,
                    str(buffer.offset),
                    str(buffer.nbytes),
                    f"{buffer.life[0]}..{buffer.life[1]}",
                )
            )
    return columns(rows, right=(3, 4)) + f"\narena: {made.arena_bytes} bytes for all layers\n"


def path() -> str:
    """The steps of layer 0 that decide the time."""
    made, layers = program(), step_layers(program())
    chosen = [made.steps[index] for index in critical_path(made, estimate(made)) if layers[index] == LAYER]
    return "".join(f"{step.index:>3} {step.stream}  {step.op.removeprefix('sidestream.')}\n" for step in chosen)


EXCERPTS: dict[str, Callable[[], str]] = {
    "source of the layer": lambda: source(DecoderLayer.forward),
    "source of the norm": lambda: source(RMSNorm.forward),
    "source of attention": lambda: source(Attention.forward),
    "source of a projection": lambda: source(LoRALinear.forward),
    "captured norm": lambda: layer_after("normalize", "input_layernorm", start=True),
    "captured projection": lambda: layer_after("normalize", "q_proj", start=True),
    "lifted": lambda: layer_after("lift_lora", "self_attn"),
    "packed": lambda: layer_after("pack_projections", "self_attn"),
    "fused": lambda: layer_after("fuse_rope_append"),
    "quantized": lambda: layer_after("fuse_quantize"),
    "lanes": lambda: layer_after("lower_lora", "self_attn"),
    "passes": passes,
    "recipes": recipes,
    "steps": steps,
    "memory": memory,
    "path": path,
    "changes": changes,
    "two streams": lambda: source(BoundProgram._run_two_streams),
    "capture": lambda: source(capture),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    return keep_true("python -m sidestream.tools.dev.pages.internals", str(__doc__), {PAGE: EXCERPTS}, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
