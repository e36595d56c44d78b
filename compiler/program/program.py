"""Program: a compiled step as plain data: buffers, views and an ordered list of launches on two streams.

A program holds no tensor and no callable. It is saved as JSON, validated on load, and bound to tensors by BoundProgram.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, Literal

import msgspec
import torch

from ..graph.recipe import Recipe, RecipeError
from .buffers import KINDS, Buffer, ProgramError, View, decode, dtype_name, encode, parse_dtype, span, views_in

VERSION = 2
STREAMS = ("main", "side")
Stream = Literal["main", "side"]
Edit = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Bucket:
    """The static sizes of a program.

    tokens     T, rows of input_ids
    sequences  B, rows of block_table
    pages      NP, pages of each KV cache
    blocks     P, columns of block_table
    decode     one token per sequence: row b of every activation is sequence b (T == B, logits_indices is 0..B-1)
    lora       False: a program without LoRA
    rows       maximum tokens per sequence in a step with drafts, with logits of every token
    parts      with `lora`: a program that also computes adapters' parts, such as DoRA's gains
    cascade    with `decode`: attention reads pages that neighbouring sequences share once
    """

    tokens: int
    sequences: int
    pages: int
    blocks: int
    decode: bool = False
    lora: bool = True
    rows: int = 1
    parts: bool = False
    cascade: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "pages", "blocks", "rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ProgramError(f"bucket {name}={value!r} must be a positive integer")
        if self.parts and not self.lora:
            raise ProgramError("a bucket with parts=True must have lora=True: parts belong to adapters")
        if self.cascade and not self.decode:
            raise ProgramError("a bucket with cascade=True must have decode=True: only decode steps share pages")
        if self.decode and self.tokens != self.sequences:
            raise ProgramError(
                f"a decode bucket has one token per sequence, not {self.tokens} tokens for {self.sequences} sequences; "
                "use decode=False"
            )
        if self.verifies and (self.decode or self.tokens != self.sequences * self.rows):
            raise ProgramError(
                f"a bucket with {self.rows} rows per sequence must have tokens={self.sequences * self.rows} for "
                f"{self.sequences} sequences, and decode=False; got tokens={self.tokens}, decode={self.decode}"
            )

    @property
    def key(self) -> dict[str, int]:
        """The fields for keys of caches: without `parts` and `cascade` those of a compiler that knows neither."""
        return {name: value for name, value in vars(self).items() if name not in ("parts", "cascade") or value}

    @property
    def verifies(self) -> bool:
        """Whether it is for steps with drafts."""
        return self.rows > 1

    @property
    def name(self) -> str:
        """The bucket's name, also a valid file name: `decode_t16_b16_p64_lora`, `verify_t64_b16_p64_lora`."""
        kind = "decode" if self.decode else "verify" if self.verifies else "mixed"
        lora = "full" if self.parts else "lora" if self.lora else "base"
        cascade = "_cascade" if self.cascade else ""
        return f"{kind}_t{self.tokens}_b{self.sequences}_p{self.blocks}_{lora}{cascade}"


@dataclass(frozen=True)
class Step:
    """One launch.

    args, kwargs  views, plain values, or tuples of them, in the schema's order; device meta means the program's device
    outs          one view per result; none for results that are arguments (in-place ops)
    waits         steps of the other stream that must finish first, unless implied by order or by an earlier wait
    records       whether a step of the other stream waits for this one
    sm_budget     maximum number of SMs; None: all
    pdl           whether it is launched with programmatic dependent launch
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
        """Yield the views among the arguments."""
        yield from views_in(self.args)
        for _, value in self.kwargs:
            yield from views_in(value)


@dataclass(frozen=True)
class Program:
    """A compiled step.

    steps    in an order that is also valid on one stream
    outputs  views or plain values
    passes   text about the static passes

    Raises ProgramError for inconsistent names, indices or offsets.
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
        """Return the buffers of the given kinds, in order."""
        return tuple(buffer for buffer in self.buffers if buffer.kind in kinds)

    @property
    def name(self) -> str:
        """The bucket's name, or `program` for a program built from example inputs."""
        return "program" if self.bucket is None else self.bucket.name

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
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

    def encoded(self) -> bytes:
        """Return the JSON text of `to_json`."""
        return json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False).encode()

    @staticmethod
    def decoded(text: bytes, edit: Edit | None = None) -> "Program":
        """Return the program of an `encoded` text; `edit` may change fields before validation. Raises ProgramError."""
        return _decode_program(text, edit)


# A start reads dozens of programs with mostly the same values, so each distinct JSON text is decoded once.

_SECTIONS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES = msgspec.json.Decoder(list[msgspec.Raw])
_STEPS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_RECIPES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MOST_VALUES = 1 << 16


def _decode_program(text: bytes, edit: Edit | None = None) -> Program:
    try:
        sections = _SECTIONS.decode(text)
        large = ("buffers", "steps", "recipes")
        plain = {name: msgspec.json.decode(raw) for name, raw in sections.items() if name not in large}
    except msgspec.ValidationError as error:
        raise ProgramError(f"a program is a JSON object ({error})") from error
    except msgspec.DecodeError as error:
        raise ProgramError(f"not JSON: {error}") from error
    if plain.get("version") != VERSION:
        raise ProgramError(
            f"the program has version {plain.get('version')!r}, this release reads version {VERSION}; compile it again"
        )
    try:
        values: dict[str, Any] = {
            "bucket": None if plain["bucket"] is None else Bucket(**plain["bucket"]),
            "buffers": tuple(_buffer(bytes(raw)) for raw in _ENTRIES.decode(sections["buffers"])),
            "steps": tuple(map(_step, _STEPS.decode(sections["steps"]))),
            "outputs": tuple(map(decode, plain["outputs"])),
            "recipes": {name: _recipe(bytes(raw)) for name, raw in _RECIPES.decode(sections["recipes"]).items()},
            **{name: plain[name] for name in ("arena_bytes", "version", "single_output", "passes")},
        }
        return Program(**(values if edit is None else edit(values)))
    except (KeyError, TypeError, AttributeError, RecipeError, msgspec.DecodeError) as error:
        raise ProgramError(f"malformed program: {type(error).__name__}: {error}") from error


def _step(entry: dict[str, msgspec.Raw]) -> Step:
    args = tuple(_value(bytes(raw)) for raw in _ENTRIES.decode(entry.pop("args")))
    return Step(args=args, **{name: _value(bytes(raw)) for name, raw in entry.items()})


@lru_cache(_MOST_VALUES)
def _value(text: bytes) -> Any:
    return decode(msgspec.json.decode(text))


@lru_cache(_MOST_VALUES)
def _buffer(text: bytes) -> Buffer:
    entry: dict[str, Any] = msgspec.json.decode(text)
    values: dict[str, Any] = {
        name: parse_dtype(value) if name == "dtype" else decode(value) for name, value in entry.items()
    }
    return Buffer(**values)


@lru_cache(_MOST_VALUES)
def _recipe(text: bytes) -> Recipe:
    return Recipe.from_json(msgspec.json.decode(text))


def _encode_fields(item: Any) -> dict[str, Any]:
    values = {entry.name: getattr(item, entry.name) for entry in fields(item)}
    dtypes = {name: dtype_name(value) for name, value in values.items() if isinstance(value, torch.dtype)}
    return {name: dtypes[name] if name in dtypes else encode(value) for name, value in values.items()}


def _validate(program: Program) -> None:
    buffers: dict[str, Buffer] = {}
    for buffer in program.buffers:
        if buffer.name in buffers:
            raise ProgramError(f"two buffers are named {buffer.name!r}")
        if buffer.kind not in KINDS:
            raise ProgramError(f"buffer {buffer.name!r} has the unknown kind {buffer.kind!r}")
        sizes = all(isinstance(size, int) and size >= 0 for size in buffer.shape)
        if not sizes or len(buffer.strides) != len(buffer.shape):
            raise ProgramError(f"buffer {buffer.name!r} has the shape {buffer.shape} with strides {buffer.strides}")
        if (buffer.kind == "temp") != isinstance(buffer.offset, int):
            raise ProgramError(
                f"buffer {buffer.name!r}: exactly the temp buffers have an offset in the arena, this {buffer.kind} "
                f"has {buffer.offset!r}"
            )
        if buffer.offset is not None and (buffer.offset < 0 or buffer.offset + buffer.nbytes > program.arena_bytes):
            raise ProgramError(
                f"buffer {buffer.name!r} at {buffer.offset} + {buffer.nbytes} bytes is outside the arena of "
                f"{program.arena_bytes} bytes"
            )
        buffers[buffer.name] = buffer
    for index, step in enumerate(program.steps):
        if step.index != index:
            raise ProgramError(f"step {step.name!r} has index {step.index} at position {index}")
        if step.stream not in STREAMS:
            raise ProgramError(f"step {step.name!r} runs on the unknown stream {step.stream!r}")
        for wait in step.waits:
            if (
                not isinstance(wait, int)
                or not 0 <= wait < index
                or program.steps[wait].stream == step.stream
                or not program.steps[wait].records
            ):
                raise ProgramError(
                    f"step {step.name!r} waits for {wait!r}, which is not an earlier, recording step of the other "
                    "stream"
                )
        for view in step.outs:
            if not isinstance(view, View):
                raise ProgramError(f"step {step.name!r} has {view!r} where a view belongs")
        _validate_views((step.args, step.kwargs, step.outs), buffers, step)
    _validate_views(program.outputs, buffers, None)


def _validate_views(values: Iterable[Any], buffers: Mapping[str, Buffer], step: Step | None) -> None:
    for value in values:
        if isinstance(value, tuple):
            _validate_views(value, buffers, step)
        elif isinstance(value, View):
            buffer = buffers.get(value.buffer)
            if buffer is None or not _fits(value, buffer):
                raise _misfit(value, buffer, "an output" if step is None else f"step {step.name!r}")


def _fits(view: View, buffer: Buffer) -> bool:
    if view.dtype is None and view.offset == 0 and view.shape == buffer.shape and view.stride == buffer.strides:
        return True  # fast path: most views are whole buffers
    if len(view.shape) != len(view.stride) or view.offset < 0:
        return False
    end = (view.offset + span(view.shape, view.stride)) * (view.dtype or buffer.dtype).itemsize
    return 0 in view.shape or end <= buffer.nbytes


def _misfit(view: View, buffer: Buffer | None, where: str) -> ProgramError:
    if buffer is None:
        return ProgramError(f"{where} uses the unknown buffer {view.buffer!r}")
    layout = f"shape {view.shape}, strides {view.stride}, offset {view.offset}"
    return ProgramError(f"{where}: a view of {layout} does not fit buffer {view.buffer!r} ({buffer.nbytes} bytes)")
