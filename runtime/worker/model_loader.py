"""Load a model: read its adapters, compile it, plan the memory, load the weights, bind the programs."""

import gc
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from ...compiler.api import CompiledModel, compile_model
from ...compiler.cost.hardware import gpu_of
from ...compiler.graph.recipe import Recipe
from ...compiler.options import CompileOptions, OptionError
from ...compiler.pipeline import PASSES, pass_names
from ...compiler.program.cache import LIMIT, ProgramCache, source_hash
from ...compiler.program.cache_folder import CacheFolder, cache_directory
from ...compiler.program.program import Program
from ...graphs.adapter import Describe
from ...graphs.adapter_description import describe_adapter
from ...graphs.checkpoint import checkpoint_config
from ...graphs.config import LlamaConfig
from ...graphs.llama import Llama
from ...graphs.lora import LoraShape
from ...graphs.model_directory import model_directory
from ..adapters.adapter_limits import draft_lora_shape, lora_shape, make_registry, num_slots, slots_within
from ..adapters.base_weights import BaseWeights
from ..adapters.registry import AdapterRegistry, RegisteredAdapter
from ..adapters.slot_loader import SlotLoader
from ..api.errors import RequestError
from ..api.sampling_params import RAW_LOGPROBS
from ..engine.exact import check_exact_adapters, check_exact_program, check_exact_update
from ..engine.options import read_keywords
from ..engine.resolve import (
    EngineSizes,
    LoadOptions,
    PageTransfer,
    check_layers,
    load_options,
    resolve_device,
    resolve_sizes,
)
from ..quantization.calibration import Calibration, calibrated
from ..quantization.rounded_weights import Rounding, find_rounding
from ..scheduler.limits import KvRole, SchedulerLimits
from ..scheduler.speculation import max_drafts
from ..scheduler.step_plan import Runner
from ..text.generation_config import eos_token_ids
from .bound_programs import estimate_longest_step
from .buckets import Buckets
from .cpu_threads import limit_cpu_threads
from .disk.page_files import open_page_files
from .memory_budget import NO_DEMAND, Specs, kv_specs, min_over_ranks, nbytes, num_host_pages, num_kv_pages, specs_of
from .model_runner import ModelRunner
from .program_processes import ProgramProcesses, number_of_processes
from .progress import print_line, progress, stage
from .sleep import SleepControl, Sleeper
from .token_history import TokenHistory
from .trained_draft import DraftModel
from .transfer.page_copier import PageCopier, stacked_specs, unstacked
from .transfer.page_reader import PageReader
from .transfer.page_writer import PageWriter
from .weight_loader import Lookup, checkpoint_lookup, dummy_lookup, load_weights


class ModelSource(NamedTuple):
    """A model's config, and the directory with its weights and tokenizer, if any."""

    config: LlamaConfig
    directory: Path | None


@dataclass
class Model:
    """A model on its device with its adapters, ready to execute plans.

    calibration   the calibration in use, or None
    rounding      the rounded weights in use, or None
    limits        limits of the scheduler
    registry      the adapters by name
    sleeper       this process's sleep mode; None without enable_sleep_mode
    seconds       start-up times by phase
    longest_step  estimated seconds of the longest step; 0.0 on a CPU
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
        tokens = eos_token_ids(directory, self.options.engine.generation_config) | set(config.eos_token_ids)
        return frozenset(token for token in tokens if token < config.vocab_size)

    def prefetch_adapters(self) -> None:
        """Load up to `max_cpu_loras` adapters into host memory, which otherwise happens while requests run."""
        if self.runner.slot_loader is not None:
            self.runner.slot_loader.prefetch(list(self.registry.numbers.values())[: self.options.engine.max_cpu_loras])

    def add_adapter(self, name: str, path: str | Path, replace: bool = False) -> RegisteredAdapter:
        """Register an adapter. With `replace` the name may be in use; its previous adapter stays until
        `runner.forget_adapter`.

        Raises RequestError or AdapterError, and changes nothing, for an adapter that the engine cannot serve.
        """
        if self.runner.slot_loader is None:
            raise RequestError(
                "the engine was started without adapters; give at least one in adapters={name: path}, or "
                "max_loras and max_lora_rank"
            )
        adapter = self.registry.add(name, path, replace)
        self.runner.slot_loader.prefetch_later([adapter.number])
        return adapter

    def update_adapter(
        self, name: str, handle: int, version: int | None = None, switch: bool = False
    ) -> tuple[RegisteredAdapter, list[int]]:
        """Make an update in an open update file the newest version of an adapter. Return it, and the numbers of
        adapters that have no name any more. `switch`: running requests are to go on with it.

        Raises errors as `add_adapter` does, and VersionConflictError; the adapters are then unchanged.
        """
        update = self.stage_update(name, handle, version, switch)
        try:
            return update, self.publish_update(update)
        except BaseException:
            self.drop_update(update.number)
            raise

    def stage_update(self, name: str, handle: int, version: int | None, switch: bool) -> RegisteredAdapter:
        """Read an update into host memory, without a name yet; see `update_adapter`."""
        if self.runner.slot_loader is None:
            raise RequestError(
                "the engine was started without adapters; give at least one in adapters={name: path}, or "
                "max_loras and max_lora_rank"
            )
        update = self.registry.add_version(name, handle, version)
        try:
            if self.limits.exact:
                check_exact_update(name, switch)
            if switch and update.adapter.invocation:
                raise RequestError(
                    f"adapter {name!r} is an aLoRA adapter, which is active from a token of the prompt on, so running "
                    "requests cannot switch to it; give inflight='pin'"
                )
            self.runner.slot_loader.prefetch([update.number])
        except BaseException:
            self.drop_update(update.number)
            raise
        return update

    def publish_update(self, update: RegisteredAdapter) -> list[int]:
        """See `AdapterRegistry.publish`."""
        return self.registry.publish(update, self.options.engine.adapter_versions)

    def drop_update(self, number: int) -> None:
        """Delete a staged update."""
        if self.runner.slot_loader is not None:
            self.runner.slot_loader.drop(number)

    def add_sum(self, number: int, parts: Sequence[tuple[int, float]]) -> None:
        """See `AdapterRegistry.add_sum`; `runner.forget_adapter` deletes the sum."""
        self.registry.add_sum(number, parts)

    def remove_adapter(self, name: str) -> int:
        """Remove a name; return its number for active requests. Raises RequestError for an unknown name."""
        return self.registry.remove(name)

    def restrict_adapters(self, roots: Sequence[str | Path]) -> None:
        """Require adapters added from now on to be under one of `roots`."""
        self.registry.restrict(roots)

    @property
    def executor(self) -> Runner:
        """Executes the scheduler's plans."""
        return self.runner

    @property
    def sleep_control(self) -> SleepControl | None:
        """Sleep mode on all ranks; None without enable_sleep_mode."""
        return self.sleeper

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason when another process of the model ends. This model has one process."""

    @property
    def precision(self) -> str:
        """See `precision_line`."""
        return precision_line(self.source, self.options, self.calibration, self.rounding)

    @property
    def numerics(self) -> str:
        """Hash of what numbers depend on: sources, versions, GPU, options, calibration and rounded weights."""
        device = self.options.device
        parts = [
            (source_hash(), torch.__version__, triton.__version__),
            device.type if device.type != "cuda" else torch.cuda.get_device_name(device),
            asdict(self.compiled.options),
            [each.name for each in self.options.passes],
            self.options.engine.seed if self.options.dummy else None,
            None if self.rounding is None else repr(self.rounding.origin),
            self.options.engine.logprobs_mode,
        ]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
        for name, tensor in sorted(self.calibration.tensors().items()) if self.calibration is not None else ():
            digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def identify_pages(self) -> None:
        """Let engines with the same weights, options and sizes of pages read each other's KV pages."""
        copier, directory = self.runner.page_copier, self.source.directory
        if not isinstance(copier, (PageReader, PageWriter)):
            return
        files = [] if directory is None else sorted(directory.glob("*.safetensors"))
        stats = [(each.name, status.st_size, status.st_mtime_ns) for each in files for status in [each.stat()]]
        parts = self.numerics, repr(self.source.config), stats, copier.page_bytes
        copier.fingerprint = hashlib.sha256(repr(parts).encode()).digest()

    def close(self) -> None:
        """End the model's other processes. This model has one process."""


def find_model(model: str | Path | Mapping[str, Any], **keywords: Any) -> tuple[ModelSource, LoadOptions]:
    """Return the model and its options from `LLM`'s keywords.

    model   a directory in the Hugging Face format, a hub id in the local cache, or for random weights the fields of
            config.json

    Starts creating a GPU's context; on a CPU sets torch's threads. Raises TypeError for an unknown keyword, OptionError
    or ConfigError.
    """
    engine, given = read_keywords(keywords)
    device = resolve_device(engine.device)
    _create_context(device)
    source = _find_source(model, engine.load_format == "dummy")
    options = load_options(engine, given, device, source.config)
    limit_cpu_threads(device, options.compiler.tensor_parallel)
    return source, options


def _find_source(model: str | Path | Mapping[str, Any], dummy: bool) -> ModelSource:
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
            f"model {str(model)!r} is not a directory; download the model first and name the directory that holds its "
            "config.json"
        )
    config = checkpoint_config(directory)
    return ModelSource(replace(config, weight_format="") if dummy else config, directory)


def load_model(
    source: ModelSource,
    adapters: Mapping[str, str | Path],
    options: LoadOptions,
    describe: Describe = describe_adapter,
) -> Model:
    """Load a model onto its device, ready to run. `describe` reads adapters' configs and headers.

    Raises OptionError, CheckpointError or AdapterError before any weight is loaded, and CapacityError if the memory is
    too small.
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
    registry = make_registry(config, engine, describe, weights)
    reads = registry.add_all(adapters)
    for _ in progress(reads, "reading adapters", "adapter", engine.show_progress, total=len(adapters)):
        pass
    slots = num_slots(engine, len(registry.numbers))
    lora = lora_shape(registry, slots, engine) if slots else None
    if engine.max_loras is None and lora is not None and lora.expert_rank and options.device.type == "cuda":
        element_bytes = 1 if compiler_options.quantizes_lora else compiler_options.model_dtype.itemsize
        _, memory = torch.cuda.mem_get_info(options.device)
        slots = slots_within(memory, lora, config, element_bytes)
        lora = replace(lora, slots=slots)
    if compiler_options.exact:
        check_exact_adapters(lora)
    registry.draft_lora = draft_lora_shape(registry, slots, engine.max_lora_rank) if lora is not None else None
    print_line(precision_line(source, options, calibration, rounding), engine.show_progress)
    with _paused_garbage_collection(), ExitStack() as stack:
        return _build(source, options, compiler_options, calibration, rounding, sizes, registry, slots, lora, stack)


def precision_line(
    source: ModelSource, options: LoadOptions, calibration: Calibration | None, rounding: Rounding | None
) -> str:
    """Return a line for the start-up output: the precision, and for int8 and fp8 whether it is calibrated."""
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
    stack: ExitStack,
) -> Model:
    """Compile, load and bind a model. Processes of the start are in `stack`. Only programs of the compiler's own pass
    list are cached on disk, because the cache's keys have only the names of passes.
    """
    config, engine, device = source.config.up_to(sizes.max_model_len), options.engine, options.device
    seconds: dict[str, float] = {}
    dtype = compiler_options.model_dtype
    with _timed(seconds, "capture_and_passes"), stage("compiling the model", engine.show_progress):
        head = registry.draft
        features = () if head is None else head.feature_layers
        model = Llama(config, lora, dtype=dtype, device="meta", features=features)

        def make_cache(key: Mapping[str, object]) -> ProgramCache | None:
            if options.passes != PASSES:
                return None
            folder = CacheFolder(cache_directory() / "programs", LIMIT)
            return ProgramCache(folder, key, compiler_options, pass_names())

        key: dict[str, object] = {"config": asdict(config), "lora": None if lora is None else lora.key}
        key |= {"features": features} if features else {}
        cache = make_cache(key)
        compiled = compile_model(model, compiler_options, passes=options.passes, cache=cache, text=False)
        buckets = Buckets(
            sizes.max_num_seqs,
            sizes.max_num_batched_tokens,
            sizes.blocks,
            sizes.blocks,
            lora is not None,
            rounded=device.type == "cpu",
            drafts=max_drafts(engine.speculation),
            parts=lora is not None and lora.varies,
        )
        largest = compiled.program(buckets.largest())
        if compiler_options.exact:
            check_exact_program(largest)
        missing = [] if cache is None or device.type == "cpu" else compiled.missing_programs(buckets.built_at_start())
        count = number_of_processes(len(missing), compiler_options.tensor_parallel)
        processes = stack.enter_context(ProgramProcesses(missing, compiled.keep, count))
        draft = None
        if head is not None:
            draft = DraftModel(
                head.up_to(sizes.max_model_len),
                Path(engine.draft),
                registry.draft_lora,
                compiler_options,
                options.passes,
                dtype,
                make_cache,
                buckets,
            )
    if rounding is not None:
        rounding.check(_recipes(largest, "weight").values(), model.checkpoint_tensors(), source.directory)
    draft_demand = NO_DEMAND if draft is None else draft.demand(buckets)
    own_pages = num_kv_pages(largest, config, engine, sizes, device, buckets.sampled_rows, draft_demand)
    num_pages = min_over_ranks(own_pages, compiler_options)
    buckets = replace(buckets, pages=num_pages)
    transfer_role: KvRole = "" if options.transfer is None else options.transfer.role
    host_pages = 0
    if engine.kv_host_gb and options.transfer is None:
        page = nbytes(kv_specs(largest, 1)) + draft_demand.page
        own_pages = num_host_pages(engine.kv_host_gb, page, compiler_options.tensor_parallel)
        host_pages = min_over_ranks(own_pages, compiler_options)
    sleeper = Sleeper(device) if engine.enable_sleep_mode else None
    constants = {} if calibration is None else calibration.tensors()
    with _timed(seconds, "load"):
        recipes, expected = _recipes(largest, "weight"), model.checkpoint_tensors()
        all_constants = {**model.derived_tensors(), **constants}

        def read_base() -> tuple[Lookup, list[str]]:
            if options.dummy or source.directory is None:
                return dummy_lookup(expected, device, dtype, engine.seed)
            return checkpoint_lookup(source.directory, expected, config)

        def read_weights(into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
            lookup, names = read_base()
            if rounding is not None:
                lookup = rounding.before(lookup)
            weights = load_weights(recipes, lookup, names, all_constants, device, dtype, engine.show_progress, into)
            return weights if draft is None else weights | draft.read_weights(device, into)

        weight_specs, stack_specs = specs_of(largest, "weight"), specs_of(largest, "adapter")
        cache_specs, stack_recipes = kv_specs(largest, num_pages), _recipes(largest, "adapter")
        if draft is not None:
            weight_specs, stack_specs = {**weight_specs, **draft.weight_specs}, {**stack_specs, **draft.stack_specs}
            cache_specs = {**cache_specs, **draft.cache_specs(num_pages)}
            stack_recipes |= draft.stack_recipes
        tensors = sleeper.read_weights(weight_specs, read_weights) if sleeper else read_weights()
    stacks = sleeper.make_stacks(stack_specs) if sleeper else _zeros(stack_specs, device)
    slot_loader = None
    if lora is not None:
        base = BaseWeights(source.directory, lambda: read_base()[0], device, engine.seed)
        slot_loader = SlotLoader(stack_recipes, stacks, registry, lora, engine.max_cpu_loras, constants, base)
        if sleeper:
            sleeper.before_sleep = slot_loader.forget_slots
    tensors.update(stacks)
    is_copied = bool(host_pages or transfer_role)
    allocated = stacked_specs(cache_specs) if is_copied else cache_specs
    caches = sleeper.make_cache(allocated) if sleeper else _zeros(allocated, device)
    tensors.update(unstacked(cache_specs, caches) if is_copied else caches)
    page_copier: PageCopier | PageReader | None = None
    if is_copied:
        with _timed(seconds, "host_memory"), stage("page-locking host memory for the KV cache", engine.show_progress):
            page_copier, host_pages = _page_copier(list(caches.values()), host_pages, device, options.transfer)
    trained = None if draft is None else draft.bind(tensors, largest, buckets, device)
    history, ring_tokens = None, engine.speculation_history
    if engine.speculation != "off":
        history = TokenHistory(sizes.max_num_seqs, sizes.max_model_len, device, ring_tokens, trained)
    runner = ModelRunner(
        compiled,
        tensors,
        buckets,
        device,
        slot_loader=slot_loader,
        vocabulary=config.vocab_size,
        enforce_eager=engine.enforce_eager,
        fail_on_compilation=engine.fail_on_compilation,
        arena_bytes=largest.arena_bytes,
        token_history=history,
        page_copier=page_copier,
        processed_logprobs=engine.logprobs_mode != RAW_LOGPROBS,
    )
    if slot_loader is not None:
        registry.lora = lora
        # on another thread, while graphs are captured
        slot_loader.prefetch_later(list(registry.numbers.values())[: engine.max_cpu_loras])
    seconds["programs_and_graphs"] = runner.warm_up(engine.show_progress, processes.wait)
    step_times: tuple[tuple[int, int, float], ...] = ()
    if engine.speculation == "auto":
        with _timed(seconds, "step_times"):
            step_times = runner.measure_step_times()
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
        host_pages=host_pages,
        exact=compiler_options.exact,
        kv_role=transfer_role,
    )
    gpu = gpu_of(device) if device.type == "cuda" else None
    longest_step = estimate_longest_step(largest, sizes.max_model_len, gpu)
    loaded = Model(
        source, options, calibration, rounding, limits, registry, runner, compiled, sleeper, seconds, longest_step
    )
    if engine.kv_disk is not None and isinstance(page_copier, PageCopier):
        directories = [source.directory, *([] if head is None else [Path(engine.draft)])]
        stamps = [BaseWeights(each, lambda: read_base()[0], device, engine.seed).stamp for each in directories]
        shapes = [(shape[0], *shape[2:], dtype) for shape, dtype in stacked_specs(cache_specs).values()]
        rank_and_targets = None if lora is None else replace(lora, slots=1).key
        parts = [loaded.numerics, asdict(config), rank_and_targets, stamps, shapes]
        page_copier.files = files = open_page_files(page_copier.pages, engine, compiler_options, parts)
        loaded.limits = replace(limits, disk_pages=files.max_files, disk_prefix=files.folder.prefix)
    return loaded


def _page_copier(
    stacks: list[torch.Tensor], num_pages: int, device: torch.device, transfer: PageTransfer | None
) -> tuple[PageCopier | PageReader, int]:
    """Return what copies KV pages, and the number of its host pages: `num_pages`, or those that `transfer` has."""
    if transfer is None:
        return PageCopier(stacks, num_pages, device), num_pages
    if transfer.role == "decode":
        return PageReader(stacks, device, transfer.sources), 0
    writer = PageWriter(stacks, device, *transfer.sources.values())
    return writer, writer.num_pages


def _recipes(program: Program, kind: str) -> dict[str, Recipe]:
    """Return buffer name -> recipe of a program's weights or adapter stacks."""
    return {buffer.name: program.recipes[buffer.name] for buffer in program.of_kind(kind)}


def _zeros(specs: Specs, device: torch.device) -> dict[str, torch.Tensor]:
    """Return zeros: uninitialized memory could hold a NaN, which a masked product would propagate."""
    return {
        name: torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
        for name, (shape, dtype) in specs.items()
    }


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin


def _create_context(device: torch.device) -> None:
    """Create a GPU's context on a thread, since it takes seconds. The first call that uses the GPU waits for it."""
    if device.type == "cuda":
        threading.Thread(target=torch.cuda.mem_get_info, args=(device,), name="cuda-context", daemon=True).start()


@contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    """Pause the collector while a start creates permanent objects, then move them to the oldest generation."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
