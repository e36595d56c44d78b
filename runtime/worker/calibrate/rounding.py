"""Round a model's weights given the inputs of its linears (`error_compensation`), for `sidestream calibrate --round`.

The inputs are the engine's own 8-bit activations on some text, with the base model and each adapter. The engine runs
the text once per group of linears. Memory holds the engine's weights, X^T X of one group (up to PRODUCT_BYTES), and the
factors and rows of one linear; results are written one by one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....compiler.graph.recipe import Recipe, rounded, rounded_from, rounded_name, rounded_parts
from ....compiler.program.calls import own_op
from ....compiler.program.program import Step
from ....graphs.checkpoint import Checkpoint, checkpoint_config
from ....graphs.config import LlamaConfig
from ....graphs.llama import Llama
from ....ops.core.kv_layout import PAGE_SIZE
from ....ops.elementwise.quantize import rotate_blocks
from ....ops.linear.linear_8bit import linear_8bit
from ...quantization.error_compensation import Compensation, compensation, round_rows
from ...quantization.rounded_weights import (
    VERSION,
    Origin,
    checkpoint_digest,
    exponents_digest,
    options_of,
    write_rounding,
)
from ..model import Model
from ..model_loader import find_model, load_model
from ..weight_loader import checkpoint_lookup, load_weights
from .scorer import Chunk, Document, Scorer, plan, step_sizes

PRODUCT_BYTES = 4 << 30
ROW_ELEMENTS = 1 << 26  # of rows that are rounded together: 256 MiB in fp32
# otherwise a linear that adds its adapters has another op or stream
ONE_OP: Mapping[str, Any] = {"_lora_lowering": "serial", "disable_passes": ("fuse_lora_expand",)}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Linear:
    """A linear of the program: its step's index, the width of its inputs, and the `rounded` recipes of its weight."""

    step: int
    width: int
    values: tuple[Recipe, ...]


def round_weights(
    directory: Path,
    adapters: Mapping[str, Any],
    texts: Sequence[Document],
    options: Mapping[str, Any],
    output: Path,
    progress: Progress = lambda stage: None,
) -> int:
    """Write rounded weights of a checkpoint for `LLM`'s keywords `options`, which include the calibration; `texts`: for
    the base model and the adapters. Returns the number of linears.

    Raises OptionError, CheckpointError or OSError, and ValueError if the options quantize no weight.
    """
    config = checkpoint_config(directory)
    model, scorer, steps = _open(directory, config, adapters, texts, options)
    linears = list(_linears(scorer))
    if not linears:
        raise ValueError(f"{directory}: these options quantize no 16-bit or 32-bit weight")
    expected = Llama(config, None, device="meta").checkpoint_tensors()
    parts = [part for linear in linears for part in linear.values]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for part in parts:
        shape = expected[rounded_from(part)]
        shapes[rounded_name(part)] = shape, _dtype(part)
        shapes[rounded_name(_scales(part))] = shape[:1], torch.float32
    used, calibration = model.compiled.options, model.calibration
    origin = Origin(
        VERSION,
        checkpoint_digest(Checkpoint(directory, config)),
        exponents_digest(calibration, used),
        options_of(used),
        {rounded_from(part): str(part.args[0]) for part in parts},
        sum(len(text.tokens) for text in texts),
        list(adapters),
    )
    lookup, names = checkpoint_lookup(directory, expected, config)
    constants = {} if calibration is None else calibration.tensors()

    def weights(recipe: Recipe) -> torch.Tensor:
        return load_weights({"": recipe}, lookup, names, constants, scorer.device, used.model_dtype)[""]

    write_rounding(output, origin, shapes, _rounded(scorer, linears, texts, steps, weights, progress))
    return len(linears)


def _open(
    directory: Path,
    config: LlamaConfig,
    adapters: Mapping[str, Any],
    texts: Sequence[Document],
    options: Mapping[str, Any],
) -> tuple[Model, Scorer, list[list[Chunk]]]:
    """Return the model, its scorer and the steps."""
    on_cpu = options.get("device") == "cpu" or not torch.cuda.is_available()
    longest = max(len(text.tokens) for text in texts)
    tokens, sequences, pages, blocks = step_sizes(config.vocab_size, longest, on_cpu)
    sizes = {
        "max_model_len": max(longest, PAGE_SIZE),
        "max_num_seqs": 8,
        "num_kv_pages": pages,
        "max_loras": len(adapters),
        "enforce_eager": True,
        "show_progress": False,
    }
    source, chosen = find_model(
        directory, rounded_weights="off", **sizes, **ONE_OP, **{"calibration": "off", **options}
    )
    model = load_model(source, adapters, chosen)
    scorer = Scorer(model, tokens, sequences, pages, blocks)
    return model, scorer, list(plan([len(text.tokens) for text in texts], tokens, sequences, pages))


def _linears(scorer: Scorer) -> Iterator[Linear]:
    """Yield the linears with weights that are rounded at load time."""
    program = scorer.bound.program
    for step in program.steps:
        if own_op(step.op) is not linear_8bit:
            continue
        weight = step.args[2]
        recipe = program.recipes[weight.buffer]
        if recipe.op == "item":
            yield Linear(step.index, weight.shape[1], rounded_parts(rounded(recipe.args[0], 0)))


def _scales(values: Recipe) -> Recipe:
    """Return the recipe of the scales for a `rounded` recipe of values."""
    return Recipe("rounded", values.args, {"index": 1})


def _dtype(values: Recipe) -> torch.dtype:
    return getattr(torch, values.args[0].attrs["dtype"])


def _rounded(
    scorer: Scorer,
    linears: Sequence[Linear],
    texts: Sequence[Document],
    steps: Sequence[list[Chunk]],
    weights: Callable[[Recipe], torch.Tensor],
    progress: Progress,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every weight's values and scales."""
    done, tokens = 0, sum(len(text.tokens) for text in texts)
    for group in _groups(linears):
        progress(f"reading {tokens:,} tokens for {len(group)} of {len(linears)} linears")
        products = _products(scorer, group, texts, steps)
        for linear in group:
            yield from _round(linear.values, compensation(products.pop(linear.step)), weights)
            done += 1
            progress(f"{done} of {len(linears)} linears rounded")


def _groups(linears: Sequence[Linear]) -> Iterator[list[Linear]]:
    """Yield groups of consecutive linears with X^T X of at most PRODUCT_BYTES, or of one linear."""
    group: list[Linear] = []
    left = PRODUCT_BYTES
    for linear in linears:
        needed = 4 * linear.width**2
        if group and needed > left:
            yield group
            group, left = [], PRODUCT_BYTES
        group.append(linear)
        left -= needed
    if group:
        yield group


@torch.no_grad()
def _products(
    scorer: Scorer, linears: Sequence[Linear], texts: Sequence[Document], steps: Sequence[list[Chunk]]
) -> dict[int, torch.Tensor]:
    """Return step index -> X^T X, fp32 [K, K]; X: the dequantized 8-bit inputs of all tokens."""
    products = {
        linear.step: torch.zeros(linear.width, linear.width, dtype=torch.float32, device=scorer.device)
        for linear in linears
    }
    tokens = 0

    def add_product(step: Step, outs: tuple[torch.Tensor, ...]) -> None:
        if step.index in products:
            q, scale = scorer.bound.arguments(step.index)[:2]
            rows = q[:tokens].float() * scale[:tokens, None]  # without padding
            products[step.index].addmm_(rows.t(), rows)

    scorer.on_step = add_product
    try:
        for step in steps:
            tokens = sum(chunk.count for chunk in step)
            scorer.logits(step, texts)
    finally:
        scorer.on_step = None
    return products


@torch.no_grad()
def _round(
    parts: Sequence[Recipe], factors: Compensation, weights: Callable[[Recipe], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of values and scales of weights with the same inputs, rounded together for speed."""
    rows = []
    for values in parts:
        (quantize,) = values.args
        rows.append(rotate_blocks(weights(quantize.args[0]), quantize.attrs["rotate"]))
    sizes = [len(each) for each in rows]
    whole = torch.cat(rows)
    del rows
    together = max(1, ROW_ELEMENTS // whole.shape[1])
    results = [round_rows(some, factors, _dtype(parts[0])) for some in whole.split(together)]
    del whole
    by_part = [torch.cat(each).split(sizes) for each in zip(*results, strict=True)]
    for values, *tensors in zip(parts, *by_part, strict=True):
        for recipe, tensor in zip((values, _scales(values)), tensors, strict=True):
            yield rounded_name(recipe), tensor
