"""From a model directory to a model that runs: read its adapters, compile, check the memory, load the weights, bind the
programs.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...compiler.api import CompiledModel, compile_model
from ...compiler.cost.hardware import gpu_of
from ...compiler.graph.recipe import Recipe
from ...compiler.options import CompileOptions, OptionError
from ...compiler.pipeline import PASSES, pass_names
from ...compiler.program.cache import ProgramCache, ProgramStore
from ...compiler.program.cache_folder import cache_directory
from ...compiler.program.program import Program
from ...graphs.adapter import Describe
from ...graphs.adapter_description import describe_adapter
from ...graphs.checkpoint import checkpoint_config
from ...graphs.config import LlamaConfig
from ...graphs.llama import Llama
from ...graphs.lora import LoraShape
from ...graphs.model_directory import model_directory
from ..adapters.registry import AdapterRegistry, KnownAdapter
from ..adapters.room import draft_lora_shape, lora_shape, num_slots, registry_of
from ..adapters.stacks import AdapterStacks
from ..api.errors import RequestError
from ..engine.options import EngineOptions, read_keywords
from ..engine.resolve import EngineSizes, LoadOptions, check_layers, load_options, resolve_device, resolve_sizes
from ..quantization.calibration import Calibration, calibrated
from ..quantization.rounded_weights import Rounding, find_rounding
from ..scheduler.limits import SchedulerLimits
from ..scheduler.runner_protocol import Runner
from ..scheduler.speculation import most_drafts
from ..text.generation_config import eos_token_ids
from .answer_history import Histories
from .buckets import Buckets
from .capacity import NOTHING, kv_specs, least_of_ranks, num_kv_pages, specs_of
from .draft_parts import DraftParts, Source, Sources
from .model_runner import ModelRunner
from .program_times import longest_step
from .progress import progress, say, stage
from .sleep import Sleeper, Sleeps
from .threads import fit_threads
from .weights import WeightSource


class ModelSource(NamedTuple):
    """A model's config, and the directory with its weights and tokenizer (None: it has none)."""

    config: LlamaConfig
    directory: Path | None


@dataclass
class Model:
    """A model on its device with its adapters, ready to execute plans.

    calibration  what is in use, or None
    rounding     the rounded weights in use, or None
    limits       what a scheduler may count on
    compiled     the CompiledModel: its passes' report, programs and dump
    registry     the adapters by name
    sleeper      gives this process's device memory back for a while; None without enable_sleep_mode
    seconds      where the start-up's time went
    longest_step seconds that the cost model gives the longest step; 0.0 on a CPU
    """

    source: ModelSource
    options: LoadOptions
    calibration: Calibration | None
    rounding: Rounding | None
    limits: SchedulerLimits
    registry: AdapterRegistry
    runner: ModelRunner
    compiled: CompiledModel
    sleeper: Sleeper | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    longest_step: float = 0.0

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a text."""
        config, directory = self.source
        found = eos_token_ids(directory, self.options.engine.generation_config) | set(config.eos_token_ids)
        return frozenset(token for token in found if token < config.vocab_size)

    def prefetch_adapters(self) -> None:
        """Wait until as many adapters as `max_cpu_loras` allows lie in host memory.

        Without it they get there while the first requests run.
        """
        if self.runner.stacks is not None:
            self.runner.stacks.prefetch(list(self.registry.numbers.values())[: self.options.engine.max_cpu_loras])

    def add_adapter(self, name: str, path: str | Path, replace: bool = False) -> KnownAdapter:
        """Make one more adapter usable, or (`replace`) give a name a new content under a number of its own; the former
        one stays until `runner.forget_adapter`.

        Raises RequestError or AdapterError, and changes nothing, for one that does not fit what the engine was started
        with.
        """
        if self.runner.stacks is None:
            raise RequestError(
                "the engine was started without adapters; give at least one in adapters={name: path}, or "
                "max_loras and max_lora_rank"
            )
        known = self.registry.add(name, path, replace)
        self.runner.stacks.fill([known.number])
        return known

    def remove_adapter(self, name: str) -> int:
        """Forget a name; returns its number, by which requests that are under way still reach the adapter. Raises
        RequestError for a name that is not known.
        """
        return self.registry.remove(name)

    def restrict_adapters(self, roots: Sequence[str | Path]) -> None:
        """From now on adapters and their files must lie under one of `roots`; those that are here may stay."""
        self.registry.restrict(roots)

    @property
    def executes(self) -> Runner:
        """What plans are given to."""
        return self.runner

    @property
    def sleeps(self) -> Sleeps | None:
        """What gives the device's memory back for a while; None without enable_sleep_mode."""
        return self.sleeper

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the reason when another process that the model needs is gone: it needs none."""

    @property
    def precision(self) -> str:
        """See `precision_line`."""
        return precision_line(self.source, self.options, self.calibration, self.rounding)

    def close(self) -> None:
        """End what the model has besides this process: nothing."""


def find_model(model: str | Path | Mapping[str, Any], **keywords: Any) -> tuple[ModelSource, LoadOptions]:
    """Return the model that the caller named, and the options that the keywords of `LLM` come to for it.

    model   a directory in the Hugging Face format, a hub id that lies in the local cache, or with random weights also
            config.json's fields

    A GPU's context is created meanwhile; on a CPU torch's threads are set. Raises TypeError for an unknown keyword,
    OptionError or ConfigError.
    """
    engine, given = read_keywords(keywords)
    device = resolve_device(engine.device)
    _wake(device)
    source = _source(model, engine.load_format == "dummy")
    options = load_options(engine, given, device, source.config)
    fit_threads(device, options.compiler.tensor_parallel)
    return source, options


def _source(model: str | Path | Mapping[str, Any], dummy: bool) -> ModelSource:
    if isinstance(model, Mapping):
        if not dummy:
            raise OptionError(
                "a model given as config fields has no weights; add load_format='dummy' for random ones, or name a "
                "model directory"
            )
        return ModelSource(replace(LlamaConfig.from_dict(model), weight_format=""), None)
    directory = model_directory(model)
    if not directory.is_dir():
        raise OptionError(
            f"model {str(model)!r} is no directory; download the model first and name the directory that holds its "
            "config.json"
        )
    config = checkpoint_config(directory)
    # random weights are stored in no way
    return ModelSource(replace(config, weight_format="") if dummy else config, directory)


def load_model(
    source: ModelSource,
    adapters: Mapping[str, str | Path],
    options: LoadOptions,
    describe: Describe = describe_adapter,
) -> Model:
    """Everything on the device, ready to run. `describe`: who reads adapters' configs and headers.

    Raises OptionError, CheckpointError or AdapterError before any weight is loaded, and CapacityError when it does not
    fit.
    """
    config, engine = source.config, options.engine
    if config.weight_format not in ("", options.compiler.precision) and options.compiler.quantizes:
        raise OptionError(
            f"the checkpoint stores its weights in {config.weight_format}, and "
            f"precision={options.compiler.precision!r} would round them once more; start with "
            f"precision={config.weight_format!r}, or 'bf16' to serve them in 16 bits"
        )
    weights = None if options.dummy else source.directory
    calibration, compiler_options = calibrated(
        engine.calibration,
        config,
        weights,
        options.compiler,
        options.hadamard,
        options.center_keys,
        options.smooth_channels,
    )
    rounding, compiler_options = find_rounding(
        engine.rounded_weights, config, weights, compiler_options, calibration, options.as_rounded
    )
    check_layers(compiler_options, config.num_hidden_layers)
    sizes = resolve_sizes(engine, config.max_position_embeddings, options.device, config.usual_context)
    registry = registry_of(config, engine, describe)
    reads = registry.add_all(adapters)
    for _known in progress(reads, "reading adapters", "adapter", engine.show_progress, total=len(adapters)):
        pass
    slots = num_slots(engine, len(registry.numbers))
    lora = lora_shape(registry, slots, engine) if slots else None
    registry.draft_lora = draft_lora_shape(registry, slots, engine.max_lora_rank) if lora is not None else None
    say(precision_line(source, options, calibration, rounding), engine.show_progress)
    with _collections_paused():
        return _build(source, options, compiler_options, calibration, rounding, sizes, registry, slots, lora)


def precision_line(
    source: ModelSource, options: LoadOptions, calibration: Calibration | None, rounding: Rounding | None
) -> str:
    """Return one line for a start: the precision, whether the checkpoint has it, and for eight bits whether it is
    calibrated.
    """
    engine, precision, (config, directory) = options.engine, options.compiler.precision, source
    if not options.compiler.quantizes:
        stored = {"bfloat16": "bf16", "float32": "fp32"}.get(config.dtype) == precision and not config.weight_format
        line = f"precision {precision}" + (", as the checkpoint stores its weights" if stored else "")
        if precision == "fp32" and config.dtype == "float16":
            line += ", which holds the checkpoint's float16 exactly"
        return line + ("; calibrations are for int8 and fp8, this one is not used" if engine.names_calibration else "")
    if calibration is not None or rounding is not None:
        return f"precision {precision}, calibrated" + ("" if rounding is None else ", with rounded weights")
    if directory is None or options.dummy:
        return f"precision {precision}, not calibrated: the weights are random"
    return (
        f"precision {precision}, not calibrated: `sidestream calibrate {directory}` or precision bf16 gives answers "
        "closer to the checkpoint's"
    )


def _build(
    source: ModelSource,
    options: LoadOptions,
    compiler_options: CompileOptions,
    calibration: Calibration | None,
    rounding: Rounding | None,
    sizes: EngineSizes,
    registry: AdapterRegistry,
    slots: int,
    lora: LoraShape | None,
) -> Model:
    """Compile, load and bind.

    Programs of a pass list other than the compiler's own are not kept between runs: the key of a kept program knows
    passes by name only.
    """
    config, engine, device = source.config.up_to(sizes.max_model_len), options.engine, options.device
    seconds: dict[str, float] = {}
    dtype = compiler_options.model_dtype
    with _timed(seconds, "capture_and_passes"), stage("compiling the model", engine.show_progress):
        head = registry.draft
        features = () if head is None else head.feature_layers
        model = Llama(config, lora, dtype=dtype, device="meta", features=features)

        def cache(parts: Mapping[str, object]) -> ProgramCache | None:
            return _program_cache(parts, compiler_options) if options.passes == PASSES else None

        parts: dict[str, object] = {"config": asdict(config), "lora": None if lora is None else asdict(lora)}
        parts |= {"features": features} if features else {}
        compiled = compile_model(model, compiler_options, passes=options.passes, cache=cache(parts), text=False)
        buckets = _buckets(sizes, sizes.blocks, lora is not None, device, engine)
        largest = compiled.program(buckets.largest())
        draft = None
        if head is not None:
            draft = DraftParts(
                head.up_to(sizes.max_model_len),
                Path(engine.draft),
                registry.draft_lora,
                compiler_options,
                options.passes,
                dtype,
                cache,
                buckets,
            )
    if rounding is not None:
        rounding.check(_recipes(largest, "weight").values(), model.checkpoint_tensors(), source.directory)
    more = NOTHING if draft is None else draft.demand(buckets)
    fits = num_kv_pages(largest, config, engine, sizes, device, buckets.sampled_rows, more)
    num_pages = least_of_ranks(fits, compiler_options)
    buckets = replace(buckets, pages=num_pages)
    sleeper = Sleeper(device) if engine.enable_sleep_mode else None
    constants = {} if calibration is None else calibration.tensors()
    with _timed(seconds, "load"):
        weights = WeightSource(
            _recipes(largest, "weight"),
            None if options.dummy else source.directory,
            model.checkpoint_tensors(),
            config,
            {**model.derived_tensors(), **constants},
            device,
            dtype,
            engine.seed,
            engine.show_progress,
            rounding,
        )
        reads: Source = weights if draft is None else Sources((weights, draft.source(device)))
        weight_specs, stack_specs = specs_of(largest, "weight"), specs_of(largest, "adapter")
        cache_specs, stack_recipes = kv_specs(largest, num_pages), _recipes(largest, "adapter")
        if draft is not None:
            weight_specs, stack_specs = {**weight_specs, **draft.weight_specs}, {**stack_specs, **draft.stack_specs}
            cache_specs = {**cache_specs, **draft.cache_specs(num_pages)}
            stack_recipes |= draft.stack_recipes
        tensors = sleeper.read_weights(weight_specs, reads) if sleeper else reads.read()
    stack_tensors = sleeper.make_stacks(stack_specs) if sleeper else _zeros(stack_specs, device)
    stacks = (
        None
        if lora is None
        else AdapterStacks(stack_recipes, stack_tensors, registry, lora, engine.max_cpu_loras, constants)
    )
    tensors.update(stack_tensors)
    tensors.update(sleeper.make_cache(cache_specs) if sleeper else _zeros(cache_specs, device))
    follows, ring_tokens = engine.speculation != "off", engine.speculation_history
    trained = None if draft is None else draft.make(tensors, largest, buckets, device)
    runner = ModelRunner(
        compiled,
        tensors,
        buckets,
        device,
        stacks=stacks,
        vocabulary=config.vocab_size,
        enforce_eager=engine.enforce_eager,
        fail_on_compilation=engine.fail_on_compilation,
        arena_bytes=largest.arena_bytes,
        histories=Histories(sizes.max_num_seqs, sizes.max_model_len, device, ring_tokens, trained) if follows else None,
    )
    if stacks is not None:
        registry.lora = lora
        # on a thread of its own, while graphs are captured
        stacks.fill(list(registry.numbers.values())[: engine.max_cpu_loras])
    seconds["programs_and_graphs"] = runner.warm_up(engine.show_progress)
    step_times: tuple[tuple[int, int, float], ...] = ()
    if engine.speculation == "auto":
        with _timed(seconds, "step_times"):
            step_times = runner.step_times()
    limits = SchedulerLimits(
        num_pages,
        sizes.max_model_len,
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        slots,
        engine.enable_prefix_caching,
        speculation=engine.speculation,
        step_times=step_times,
        speculation_history=ring_tokens,
    )
    longest = longest_step(largest, sizes.max_model_len, gpu_of(device) if device.type == "cuda" else None)
    return Model(source, options, calibration, rounding, limits, registry, runner, compiled, sleeper, seconds, longest)


def _program_cache(parts: Mapping[str, object], options: CompileOptions) -> ProgramCache:
    return ProgramCache(ProgramStore(cache_directory() / "programs"), parts, options, pass_names())


def _buckets(sizes: EngineSizes, pages: int, lora: bool, device: torch.device, options: EngineOptions) -> Buckets:
    return Buckets(
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        pages,
        sizes.blocks,
        lora,
        rounded=device.type == "cpu",
        drafts=most_drafts(options.speculation),
    )


def _recipes(program: Program, kind: str) -> dict[str, Recipe]:
    """Buffer name -> recipe of a program's weights or adapter stacks."""
    return {buffer.name: program.recipes[buffer.name] for buffer in program.of_kind(kind)}


def _zeros(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> dict[str, torch.Tensor]:
    """Zeros, also in eight bits: memory that was never written must not hold a NaN that a masked product could
    spread.
    """
    return {
        name: torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
        for name, (shape, dtype) in specs.items()
    }


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin


def _wake(device: torch.device) -> None:
    """Create a GPU's context on a thread of its own (it takes seconds); the first to need the GPU waits for it."""
    if device.type == "cuda":
        threading.Thread(target=torch.cuda.mem_get_info, args=(device,), name="wake-the-gpu", daemon=True).start()


@contextmanager
def _collections_paused() -> Iterator[None]:
    """No cyclic garbage collection while a start builds some hundred thousand objects, all of which stay: they come
    to the oldest generation unseen.
    """
    enabled, others = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    try:
        yield
    finally:
        if not others:
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
