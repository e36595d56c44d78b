"""Program: a compiled step as plain data: buffers, views and an ordered list of launches on two streams.

A program holds no tensor and no callable. It is saved as JSON, checked when loaded, and bound to tensors by `emit.BoundProgram`.
"""
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from .buffers import KINDS, Buffer, ProgramError, View, decode, dtype_name, encode, parse_dtype, span, views_in
from .recipe import Recipe, RecipeError

VERSION = 2
STREAMS = ("main", "side")
Stream = Literal["main", "side"]


@dataclass(frozen=True)
class Bucket:
    """The static sizes that a program is made for.

    tokens     T, rows of input_ids
    sequences  B, rows of block_table
    pages      NP, pages of each KV cache
    blocks     P, columns of block_table
    decode     one token a sequence: row b of every activation is sequence b (so T == B, and logits_indices is 0..B-1)
    lora       False: the twin without LoRA
    """

    tokens: int
    sequences: int
    pages: int
    blocks: int
    decode: bool = False
    lora: bool = True

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "pages", "blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ProgramError(f"bucket {name}={value!r} must be a positive integer")
        if self.decode and self.tokens != self.sequences:
            raise ProgramError(f"a decode bucket has one token a sequence, not {self.tokens} tokens for {self.sequences} sequences; use decode=False")

    @property
    def name(self) -> str:
        """A short name, also fit for a file: `decode_t16_b16_p64_lora`."""
        return f"{'decode' if self.decode else 'mixed'}_t{self.tokens}_b{self.sequences}_p{self.blocks}_{'lora' if self.lora else 'base'}"


@dataclass(frozen=True)
class Step:
    """One launch.

    `args` and `kwargs`: views, plain values, or tuples of them, as the op's schema orders them; device meta stands for the program's device.
    `outs`: where each result goes (a result that is one of the arguments, as for in-place ops, has none). `waits`: steps of the other stream that
    must have finished; what program order or an earlier wait implies is left out. `records`: a step of the other stream waits for this one.
    `sm_budget`: at most so many SMs.
    `pdl`: launched with programmatic dependent launch.
    """

    index: int
    name: str
    op: str
    args: tuple[Any, ...]
    outs: tuple[View, ...]
    stream: Stream = "main"
    waits: tuple[int, ...] = ()
    records: bool = False
    sm_budget: int | None = None
    pdl: bool = False
    kwargs: tuple[tuple[str, Any], ...] = ()

    def inputs(self) -> Iterator[View]:
        """The views among the arguments."""
        yield from views_in(self.args)
        for _, value in self.kwargs:
            yield from views_in(value)


@dataclass(frozen=True)
class Program:
    """A compiled step: `steps` in an order that is right on one stream too, `outputs` as the graph returned them (views or plain values).
    `passes` is a text for people: what the passes over this program's own graph did.

    Raises ProgramError when names, indices or offsets contradict each other.
    """

    bucket: Bucket | None
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    arena_bytes: int
    outputs: tuple[Any, ...]
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    version: int = VERSION
    single_output: bool = False
    passes: str = ""

    def __post_init__(self) -> None:
        _validate(self)

    @cached_property
    def by_name(self) -> dict[str, Buffer]:
        """Buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    def of_kind(self, *kinds: str) -> tuple[Buffer, ...]:
        """The buffers of the given kinds, in order."""
        return tuple(buffer for buffer in self.buffers if buffer.kind in kinds)

    @property
    def name(self) -> str:
        """The bucket's name, or `program` for one made from example inputs."""
        return "program" if self.bucket is None else self.bucket.name

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "version": self.version,
            "bucket": None if self.bucket is None else vars(self.bucket).copy(),
            "arena_bytes": self.arena_bytes,
            "single_output": self.single_output,
            "passes": self.passes,
            "outputs": [encode(value) for value in self.outputs],
            "buffers": [_encode_fields(buffer) for buffer in self.buffers],
            "steps": [_encode_fields(step) for step in self.steps],
            "recipes": {name: recipe.to_json() for name, recipe in self.recipes.items()},
        }

    @staticmethod
    def from_json(data: Any) -> "Program":
        """The program that `to_json` wrote. Raises ProgramError for anything else, or for another version."""
        if not isinstance(data, dict):
            raise ProgramError(f"a program is a JSON object, not {type(data).__name__}")
        if data.get("version") != VERSION:
            raise ProgramError(f"the program has version {data.get('version')!r}, this release reads version {VERSION}; compile it again")
        try:
            bucket = None if data["bucket"] is None else Bucket(**data["bucket"])
            return Program(
                bucket=bucket,
                buffers=tuple(Buffer(**_decode_fields(entry)) for entry in data["buffers"]),
                steps=tuple(_step(entry) for entry in data["steps"]),
                arena_bytes=data["arena_bytes"],
                outputs=tuple(decode(value) for value in data["outputs"]),
                recipes={name: Recipe.from_json(entry) for name, entry in data["recipes"].items()},
                version=data["version"],
                single_output=data["single_output"],
                passes=data["passes"],
            )
        except (KeyError, TypeError, AttributeError, RecipeError) as error:
            raise ProgramError(f"malformed program: {type(error).__name__}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write JSON to `path`."""
        Path(path).write_text(json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> "Program":
        """Read what `save` wrote. Raises ProgramError when it is not a program, OSError when it can't be read."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ProgramError(f"{path} is not JSON: {error}") from error
        try:
            return Program.from_json(data)
        except ProgramError as error:
            raise ProgramError(f"{path}: {error}") from error


def _encode_fields(item: Any) -> dict[str, Any]:
    values = {entry.name: getattr(item, entry.name) for entry in fields(item)}
    return {name: dtype_name(value) if isinstance(value, torch.dtype) else encode(value) for name, value in values.items()}


def _decode_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: parse_dtype(value) if name == "dtype" else decode(value) for name, value in entry.items()}


def _step(entry: Mapping[str, Any]) -> Step:
    return Step(**_decode_fields(entry))


def _validate(program: Program) -> None:
    buffers: dict[str, Buffer] = {}
    for buffer in program.buffers:
        if buffer.name in buffers:
            raise ProgramError(f"two buffers are named {buffer.name!r}")
        if buffer.kind not in KINDS:
            raise ProgramError(f"buffer {buffer.name!r} has the unknown kind {buffer.kind!r}")
        if any(not isinstance(size, int) or size < 0 for size in buffer.shape) or len(buffer.strides) != len(buffer.shape):
            raise ProgramError(f"buffer {buffer.name!r} has the impossible shape {buffer.shape} with strides {buffer.strides}")
        if (buffer.kind == "temp") != isinstance(buffer.offset, int):
            raise ProgramError(f"buffer {buffer.name!r}: exactly the temp buffers have an offset in the arena, this {buffer.kind} has {buffer.offset!r}")
        if buffer.offset is not None and (buffer.offset < 0 or buffer.offset + buffer.nbytes > program.arena_bytes):
            raise ProgramError(f"buffer {buffer.name!r} at {buffer.offset} + {buffer.nbytes} bytes lies outside the arena of {program.arena_bytes} bytes")
        buffers[buffer.name] = buffer
    for index, step in enumerate(program.steps):
        if step.index != index:
            raise ProgramError(f"step {step.name!r} has index {step.index} at position {index}")
        if step.stream not in STREAMS:
            raise ProgramError(f"step {step.name!r} runs on the unknown stream {step.stream!r}")
        for wait in step.waits:
            if not isinstance(wait, int) or not 0 <= wait < index or program.steps[wait].stream == step.stream or not program.steps[wait].records:
                raise ProgramError(f"step {step.name!r} waits for {wait!r}, which is not an earlier, recording step of the other stream")
        for view in (*step.inputs(), *step.outs):
            _validate_view(view, buffers, f"step {step.name!r}")
    for view in views_in(program.outputs):
        _validate_view(view, buffers, "an output")


def _validate_view(view: Any, buffers: Mapping[str, Buffer], where: str) -> None:
    if not isinstance(view, View):
        raise ProgramError(f"{where} has {view!r} where a view belongs")
    buffer = buffers.get(view.buffer)
    if buffer is None:
        raise ProgramError(f"{where} uses the unknown buffer {view.buffer!r}")
    fits = len(view.shape) == len(view.stride) and view.offset >= 0
    if fits and 0 not in view.shape:
        fits = (view.offset + span(view.shape, view.stride)) * (view.dtype or buffer.dtype).itemsize <= buffer.nbytes
    if not fits:
        layout = f"shape {view.shape}, strides {view.stride}, offset {view.offset}"
        raise ProgramError(f"{where}: a view of {layout} does not fit buffer {view.buffer!r} ({buffer.nbytes} bytes)")
