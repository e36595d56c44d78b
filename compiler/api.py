"""`sidestream.compile`: compile a module into a CompiledModel, which builds and runs a Program for each bucket."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .build_program import build_program
from .cost.hardware import H200, Gpu, gpu_here
from .cost.timings import Timings
from .graph.capture import Captured, capture_module
from .graph.materialize import materialize
from .graph.recipe import Recipe
from .graph.repeated_layers import capture_model
from .options import CompileOptions
from .pass_records import PassRecord, pass_table
from .pipeline import PASSES, Optimized, Pass, check_disabled, optimize
from .program.cache import ProgramCache
from .program.layers import HEAD, TAIL
from .program.program import Bucket, Program
from .program.sizes import bucket_inputs, placeholders
from .run.bound_program import BoundProgram

log = logging.getLogger(__name__)
BIND_ERRORS = (ValueError, TypeError, LookupError, AttributeError)
"""Exceptions of binding a cached program that is inconsistent or outdated; ProgramError is a ValueError."""


def compile_model(
    module: torch.nn.Module,
    options: CompileOptions | None = None,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    dynamic_shapes: Any = None,
    passes: tuple[Pass, ...] = PASSES,
    cache: ProgramCache | None = None,
    text: bool = True,
) -> "CompiledModel":
    """Capture `module`, run the passes, and return the CompiledModel.

    `module`         Sidestream's Llama (also on the meta device), or any module that torch.export can trace, such as
                     transformers' Llama with peft
    `example_inputs` keyword (mapping) or positional arguments for the capture; default: `module.example_inputs()`
    `dynamic_shapes` symbolic dimensions in the format of torch.export; without them every shape is static
    `passes`         the ordered list of passes
    `cache`          programs stored between runs; capture and passes run only for programs that it does not have
    `text`           False: records contain no graphs until `dump` is called; the passes take a third less time

    Raises CaptureError, OptionError, or PassCountError when a pass has an unexpected number of matches.
    """
    options = options or CompileOptions()
    if example_inputs is None and not hasattr(module, "example_inputs"):
        raise TypeError(
            f"{type(module).__name__} has no example_inputs(); pass example_inputs={{...}} with the arguments to "
            "capture it with"
        )
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    check_disabled(options, passes)

    kept: Captured | None = None

    def make(text: bool) -> Optimized:
        nonlocal kept
        if kept is not None:
            captured = kept
        elif example_inputs is None:
            captured = capture_model(module)
        else:
            inputs = dict(example_inputs) if isinstance(example_inputs, Mapping) else example_inputs
            captured = capture_module(module, inputs, dynamic_shapes)
        kept = None if text else captured.copy()  # for `dump`
        return optimize(captured, options, names, passes, text=text)

    return CompiledModel(make, options, module, cache, text)


class CompiledModel:
    """An optimized graph and its programs. Capture and passes run on first use, and not if all programs are cached.

    options          the options of the compilation
    programs         the programs built or loaded so far, by bucket
    """

    def __init__(
        self,
        make: Callable[[bool], Optimized],
        options: CompileOptions,
        module: torch.nn.Module | None = None,
        cache: ProgramCache | None = None,
        text: bool = True,
    ) -> None:
        """Store the arguments of `compile_model`; `make(text)` captures the module and runs the passes."""
        self.options = options
        self.programs: dict[Bucket, Program] = {}
        self._make, self._module, self._cache, self._text = make, module, cache, text
        self._by_shape: dict[tuple[Any, ...], Program] = {}
        self._from_cache: set[Bucket] = set()
        self._weights: dict[str, torch.Tensor] = {}
        if cache is None:
            _ = self._optimized  # report errors of the compilation now

    @cached_property
    def _optimized(self) -> Optimized:
        return self._make(self._text)

    @property
    def _captured(self) -> Captured:
        return self._optimized.captured

    @property
    def graph_module(self) -> fx.GraphModule:
        """The optimized graph (readable: `print(compiled.graph_module.code)`)."""
        return self._captured.graph_module

    @property
    def records(self) -> list[PassRecord]:
        """One PassRecord for each pass."""
        return self._optimized.records

    def _placeholders(self, kind: str) -> list[fx.Node]:
        return [node for node in placeholders(self.graph_module.graph) if node.meta["kind"] == kind]

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Recipes of the weights, by buffer name."""
        return {node.name: node.meta["recipe"] for node in self._placeholders("weight")}

    @property
    def adapter_recipes(self) -> dict[str, Recipe]:
        """Recipes of the LoRA stacks, by buffer name."""
        return {node.name: node.meta["recipe"] for node in self._placeholders("adapter")}

    @property
    def input_names(self) -> tuple[str, ...]:
        """The graph's inputs besides weights and adapters."""
        return tuple(node.name for node in self._placeholders("input"))

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors of the module that are not in checkpoints, by their names in recipes."""
        return self._captured.constants

    def tensor_specs(self, bucket: Bucket) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name -> (shape, dtype) of every input, weight and adapter stack at the sizes of `bucket`."""
        specs = bucket_inputs(self.graph_module, bucket)
        return {name: spec for name, spec in specs.items() if isinstance(spec, tuple)}

    def program(self, bucket: Bucket) -> Program:
        """Return the program for `bucket`, from the cache if possible."""
        if bucket not in self.programs:
            program = None if self._cache is None else self._cache.load(bucket)
            if program is None:
                program = self._build(bucket)
            else:
                self._from_cache.add(bucket)
            self.programs[bucket] = program
        return self.programs[bucket]

    def missing_programs(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Return the buckets without a program in this process or in the cache."""
        made = [bucket for bucket in buckets if bucket not in self.programs]
        return made if self._cache is None else [bucket for bucket in made if not self._cache.has(bucket)]

    def keep(self, bucket: Bucket) -> Program:
        """Build the program for `bucket`, save it in the cache and return it."""
        return self.program(bucket) if self._cache is None else self._build(bucket)

    def saved(self, bucket: Bucket) -> Program | None:
        """Return the program for `bucket` from the cache, or None."""
        return None if self._cache is None else self._cache.load(bucket)

    def rebuilt(self, bucket: Bucket, problem: Exception) -> Program:
        """Build the program for `bucket` again if binding the cached one failed; for a new one raise `problem`."""
        if bucket not in self._from_cache:
            raise problem
        log.warning("the cached program %s cannot be bound and is built again: %s", bucket.name, problem)
        self._from_cache.discard(bucket)
        self.programs[bucket] = self._build(bucket)
        return self.programs[bucket]

    def _build(self, bucket: Bucket) -> Program:
        program = build_program(self.graph_module, bucket, self.options)
        if self._cache is not None:
            self._cache.save(bucket, program)
        return program

    def bind(self, bucket: Bucket, tensors: Mapping[str, torch.Tensor], **options: Any) -> BoundProgram:
        """Bind the program for `bucket` to tensors by buffer name; see BoundProgram for `options`."""
        try:
            return BoundProgram(self.program(bucket), tensors, **options)
        except BIND_ERRORS as problem:
            return BoundProgram(self.rebuilt(bucket, problem), tensors, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the module's own weights with the module's arguments; new shapes build a new program.

        A quantized KV cache is passed as `kv_caches` in `options.cache_dtype`, and its scales as `kv_scales=[...]`.
        """
        inputs = self._flatten(args, kwargs)
        given = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        key = tuple((name, tuple(value.shape), value.dtype, value.device) for name, value in given.items())
        device = next((value.device for value in given.values()), torch.device("cpu"))
        tensors = {**self._module_weights(device), **inputs}
        if key not in self._by_shape:
            self._by_shape[key] = build_program(self.graph_module, tensors, self.options)
        results = BoundProgram(self._by_shape[key], tensors, device).run()
        return pytree.tree_unflatten(list(results), self._captured.out_spec)

    def report(self) -> str:
        """Return the table of passes as text."""
        return pass_table(self.records)

    def explain(self, buckets: Sequence[Bucket] = ()) -> str:
        """Return the breakdown of a step's estimated time, as text, for `buckets` or the programs built so far."""
        from .inspect.explain import as_text, explain

        programs = [self.program(bucket) for bucket in buckets] or list(self.programs.values())
        return as_text(explain(self.options, self.records, programs, gpu=gpu_here()), self.records)

    def dump(
        self,
        directory: str | Path,
        buckets: Sequence[Bucket] = (),
        *,
        layers: Sequence[int] | None = None,
        timings: Timings | None = None,
        show_timings: bool = False,
        show_resources: bool = False,
        ledger: Mapping[str, float] | None = None,
        gpu: Gpu = H200,
    ) -> Path:
        """Write graphs before and after each pass, programs, schedules, traces and `index.html`; return the directory.

        The same model, options and version give the same bytes, except `timings.json`. `buckets`: default: the programs
        built so far. `layers`: write only the graphs of these layers. `timings`: measured steps and compiled kernels,
        for timings.json and, with `show_timings` or `show_resources`, for the page. `ledger`: pass name -> relative
        error, for the page. `gpu`: GPU of the estimates.
        """
        from .inspect.dump import dump

        records = self.records if self._text else self._make(True).records
        programs = [self.program(bucket) for bucket in buckets] or list(self.programs.values())
        count = len({line.layer for record in records[:1] for line in record.lines_before} - {HEAD, TAIL})
        name = "A graph" if self._module is None else type(self._module).__name__
        dump(
            Path(directory),
            records,
            programs,
            options=self.options,
            title=f"{name}, {count} layer{'s' * (count != 1)}",
            layers=layers,
            timings=timings,
            show_timings=show_timings,
            show_resources=show_resources,
            ledger=ledger,
            gpu=gpu,
        )
        return Path(directory)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return call arguments by placeholder name."""
        spec, names = self._captured.in_spec, self._captured.user_inputs
        extra = {name: value for name, value in kwargs.items() if name == "kv_scales"}
        kwargs = {name: value for name, value in kwargs.items() if name not in extra}
        if spec is not None:
            wanted = list(spec.child(1).context if hasattr(spec, "child") else spec.children_specs[1].context)
            unknown, missing = set(kwargs) - set(wanted), set(wanted) - set(kwargs)
            if unknown or missing:
                raise TypeError(
                    f"the compiled model takes the keyword arguments {wanted}; unknown: {sorted(unknown)}, missing: "
                    f"{sorted(missing)}"
                )
            kwargs = {name: kwargs[name] for name in wanted}
        flat, given = pytree.tree_flatten((args, kwargs))
        if len(flat) != len(names):
            raise TypeError(
                f"the compiled model takes {len(names)} tensors and values, got {len(flat)} ({given}); it was "
                f"captured with: {', '.join(names)}"
            )
        inputs = dict(zip(names, flat, strict=True))
        for index, value in enumerate(extra.get("kv_scales", ())):
            inputs[f"kv_scales_{index}"] = value
        return {name: value for name, value in inputs.items() if name in self.input_names}

    def _module_weights(self, device: torch.device) -> dict[str, torch.Tensor]:
        if not self._weights:
            if self._module is None:
                raise RuntimeError("this model was compiled without its module; use bind() with tensors of your own")
            state = {**self.constants, **dict(self._module.named_buffers()), **dict(self._module.named_parameters())}
            if any(value.is_meta for value in state.values()):
                raise RuntimeError(
                    "the module is on the meta device and has no weights to run with; load it first, or use bind() "
                    "with tensors of your own"
                )
            self._weights = materialize_all({**self.recipes, **self.adapter_recipes}, state, device)
        return self._weights


def materialize_all(
    recipes: Mapping[str, Recipe], state: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return every recipe's tensor from `state`, on `device`."""
    memo: dict[Recipe, Any] = {}
    lookup = partial(_detached, state)
    return {name: materialize(recipe, lookup, memo).to(device).contiguous() for name, recipe in recipes.items()}


def _detached(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return state[name].detach()
