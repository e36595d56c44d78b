"""Load a model: read its adapters, compile it, plan the memory, load the weights, bind the programs."""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...compiler.api import CompiledModel, compile_model
from ...compiler.cost.hardware import gpu_of
from ...compiler.graph.recipe import Recipe
from ...compiler.options import CompileOptions, OptionError
from ...compiler.pipeline import PASSES, pass_names
from ...compiler.program.cache import LIMIT, ProgramCache
from ...compiler.program.cache_folder import CacheFolder, cache_directory
from ...compiler.program.program import Program
from ...compiler.run.kernel_compilation import preparing
from ...graphs.adapter import Describe
from ...graphs.adapter_description import describe_adapter
from ...graphs.checkpoint import checkpoint_config
from ...graphs.config import LlamaConfig
from ...graphs.llama import Llama
from ...graphs.lora import LoraShape
from ...graphs.model_directory import model_directory
from ..adapters.adapter_limits import draft_lora_shape, lora_shape, make_registry, num_slots, slots_within
from ..adapters.base_weights import BaseWeights
from ..adapters.registry import AdapterRegistry
from ..adapters.slot_loader import SlotLoader
from ..api.sampling_params import RAW_LOGPROBS
from ..engine.exact import check_exact_adapters, check_exact_program
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
from ..scheduler.limits import SchedulerLimits
from ..scheduler.speculation import max_drafts
from .buckets import Buckets
from .cascade_attention import cascade_limits
from .cpu_threads import limit_cpu_threads
from .disk.page_files import open_page_files
from .memory_budget import NO_DEMAND, Specs, kv_specs, min_over_ranks, nbytes, num_host_pages, num_kv_pages, specs_of
from .model import Model, ModelSource, precision_line
from .model_runner import ModelRunner
from .programs.bound_programs import estimate_longest_step
from .programs.kernel_queue import KernelQueue, queue_target
from .programs.program_processes import ProgramProcesses, number_of_processes
from .progress import print_line, progress, stage
from .sleep import Sleeper
from .speculation.token_history import TokenHistory
from .speculation.trained_draft import DraftModel
from .transfer.page_copier import PageCopier, stacked_specs, unstacked
from .transfer.page_reader import PageReader
from .transfer.page_writer import PageWriter
from .weight_loader import Lookup, checkpoint_lookup, dummy_lookup, load_weights


def find_model(model: str | Path | Mapping[str, Any], **keywords: Any) -> tuple[ModelSource, LoadOptions]:
    """Return the model and its options from `LLM`'s keywords.

    model   a directory in the Hugging Face format, a hub id in the local cache, or for random weights the fields of
            config.json

    Starts creating a GPU's context; on a CPU sets torch's threads. Raises TypeError for an unknown keyword, OptionError
    or ConfigError.
    """
    engine, given = read_keywords(keywords)
    device = resolve_device(engine.device)
    if device.type == "cuda":
        preparing(device)  # the first call that uses the GPU waits for its context
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
        start = _Start(source, options, compiler_options, calibration, rounding, sizes, registry, lora)
        return start.run(stack)


@dataclass
class _Programs:
    """The compiled model, its buckets, the program that needs the most memory, and the compiled draft, if any."""

    module: Llama
    compiled: CompiledModel
    buckets: Buckets
    largest: Program
    draft: DraftModel | None

    def recipes(self, kind: str) -> dict[str, Recipe]:
        """Return buffer name -> recipe of the model's weights or adapter stacks."""
        return {buffer.name: self.largest.recipes[buffer.name] for buffer in self.largest.of_kind(kind)}

    @property
    def stack_recipes(self) -> dict[str, Recipe]:
        """Recipes of the adapter stacks, also the draft's."""
        return self.recipes("adapter") | ({} if self.draft is None else self.draft.stack_recipes)

    @property
    def weight_specs(self) -> Specs:
        """Shape and dtype of all weights."""
        return {**specs_of(self.largest, "weight"), **({} if self.draft is None else self.draft.weight_specs)}

    @property
    def stack_specs(self) -> Specs:
        """Shape and dtype of all adapter stacks."""
        return {**specs_of(self.largest, "adapter"), **({} if self.draft is None else self.draft.stack_specs)}

    def cache_specs(self, pages: int) -> Specs:
        """Shape and dtype of all KV caches."""
        return {**kv_specs(self.largest, pages), **({} if self.draft is None else self.draft.cache_specs(pages))}


@dataclass
class _Start:
    """The start of a model: compile it, plan its memory, load its weights, bind its programs."""

    source: ModelSource
    options: LoadOptions
    compiler_options: CompileOptions
    calibration: Calibration | None
    rounding: Rounding | None
    sizes: EngineSizes
    registry: AdapterRegistry
    lora: LoraShape | None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine, self.device = self.options.engine, self.options.device
        self.dtype = self.compiler_options.model_dtype
        self.sleeper = Sleeper(self.device) if self.engine.enable_sleep_mode else None

    def run(self, stack: ExitStack) -> Model:
        """Return the model, ready to execute plans. `stack` ends the processes of the start."""
        with self._timed("capture_and_passes"), stage("compiling the model", self.engine.show_progress):
            programs = self._compile()
            # forked here: they have the optimized graph, and build programs while weights load
            processes = stack.enter_context(self._program_processes(programs))
            programs.draft = self._compile_draft(programs.buckets)
        if self.rounding is not None:
            expected = programs.module.checkpoint_tensors()
            self.rounding.check(programs.recipes("weight").values(), expected, self.source.directory)
        num_pages, host_pages = self._plan_pages(programs)
        programs.buckets = replace(programs.buckets, pages=num_pages)
        with self._timed("load"):
            tensors = self._read_weights(programs)
        stacks = self._make_stacks(programs)
        slot_loader = None if self.lora is None else self._slot_loader(self.lora, programs, stacks)
        cache_specs = programs.cache_specs(num_pages)
        caches, copier, host_pages = self._make_cache(cache_specs, host_pages)
        runner = self._make_runner(programs, tensors | stacks | caches, slot_loader, copier)
        if slot_loader is not None:
            self.registry.lora = self.lora
            # on another thread, while graphs are captured
            slot_loader.prefetch_later(list(self.registry.numbers.values())[: self.engine.max_cpu_loras])
        self.seconds["programs_and_graphs"] = runner.warm_up(self.engine.show_progress, processes)
        limits = self._limits(num_pages, host_pages, runner)
        gpu = gpu_of(self.device) if self.device.type == "cuda" else None
        model = Model(
            self.source,
            self.options,
            self.calibration,
            self.rounding,
            limits,
            self.registry,
            runner,
            programs.compiled,
            self.sleeper,
            self.seconds,
            estimate_longest_step(programs.largest, self.sizes.max_model_len, gpu),
        )
        if self.engine.kv_disk is not None and isinstance(copier, PageCopier):
            self._open_page_files(model, programs, copier, cache_specs)
        return model

    def _compile(self) -> _Programs:
        config, options, sizes, lora = self._config, self.compiler_options, self.sizes, self.lora
        features = () if self.registry.draft is None else self.registry.draft.feature_layers
        module = Llama(config, lora, dtype=self.dtype, device="meta", features=features)
        key: dict[str, object] = {"config": asdict(config), "lora": None if lora is None else lora.key}
        key |= {"features": features} if features else {}
        cache = self._program_cache(key)
        compiled = compile_model(module, options, passes=self.options.passes, cache=cache, text=False)
        buckets = Buckets(
            sizes.max_num_seqs,
            sizes.max_num_batched_tokens,
            sizes.blocks,
            sizes.blocks,
            lora is not None,
            rounded=self.device.type == "cpu",
            drafts=max_drafts(self.engine.speculation),
            parts=lora is not None and lora.varies,
            cascade=self._cascade[0] > 0,
        )
        largest = compiled.program(buckets.largest())
        if options.exact:
            check_exact_program(largest)
        return _Programs(module, compiled, buckets, largest, None)

    @property
    def _config(self) -> LlamaConfig:
        return self.source.config.up_to(self.sizes.max_model_len)

    @property
    def _cascade(self) -> tuple[int, int]:
        return cascade_limits(self._config, self.engine, self.compiler_options, self.sizes.max_num_seqs)

    def _program_cache(self, key: Mapping[str, object]) -> ProgramCache | None:
        """Return the cache on disk; None for other pass lists than the compiler's own: keys have only passes' names."""
        if self.options.passes != PASSES:
            return None
        folder = CacheFolder(cache_directory() / "programs", LIMIT)
        return ProgramCache(folder, key, self.compiler_options, pass_names())

    def _program_processes(self, programs: _Programs) -> ProgramProcesses:
        compiled, buckets = programs.compiled, programs.buckets
        if self.device.type == "cuda":
            preparing(self.device).join()  # processes inherit what it has found, and no lock that it holds
        kinds = buckets.captured_buckets(), buckets.warm_up_buckets()[::-1], buckets.later_buckets()
        if self.options.passes == PASSES and self.device.type != "cpu":
            captured, mixed, later = map(compiled.missing_programs, kinds)
            missing = [*captured, *mixed, *later]
        else:
            captured, mixed, missing = [], [], []
        count = number_of_processes(len(missing), self.compiler_options.tensor_parallel)
        target = queue_target(self.device) if count else None
        queues = [] if target is None else [KernelQueue(each, compiled.saved, target) for each in (captured, mixed)]
        return ProgramProcesses(missing, compiled.keep, count, queues)

    def _compile_draft(self, buckets: Buckets) -> DraftModel | None:
        head = self.registry.draft
        if head is None:
            return None
        return DraftModel(
            head.up_to(self.sizes.max_model_len),
            Path(self.engine.draft),
            self.registry.draft_lora,
            self.compiler_options,
            self.options.passes,
            self.dtype,
            self._program_cache,
            buckets,
        )

    def _plan_pages(self, programs: _Programs) -> tuple[int, int]:
        """Return the numbers of KV pages on the device and in host memory."""
        demand = NO_DEMAND if programs.draft is None else programs.draft.demand(programs.buckets)
        rows = programs.buckets.sampled_rows
        pages = num_kv_pages(programs.largest, self._config, self.engine, self.sizes, self.device, rows, demand)
        pages, host_pages = min_over_ranks(pages, self.compiler_options), 0
        if self.engine.kv_host_gb and self.options.transfer is None:
            page = nbytes(programs.cache_specs(1))
            host_pages = num_host_pages(self.engine.kv_host_gb, page, self.compiler_options.tensor_parallel)
            host_pages = min_over_ranks(host_pages, self.compiler_options)
        return pages, host_pages

    def _read_weights(self, programs: _Programs) -> dict[str, torch.Tensor]:
        recipes, expected = programs.recipes("weight"), programs.module.checkpoint_tensors()
        constants = {**programs.module.derived_tensors(), **self._constants}
        draft, show_progress = programs.draft, self.engine.show_progress

        def read(into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
            lookup, names = self._read_base(expected)
            if self.rounding is not None:
                lookup = self.rounding.before(lookup)
            weights = load_weights(recipes, lookup, names, constants, self.device, self.dtype, show_progress, into)
            return weights if draft is None else weights | draft.read_weights(self.device, into)

        return self.sleeper.read_weights(programs.weight_specs, read) if self.sleeper else read()

    @property
    def _constants(self) -> dict[str, torch.Tensor]:
        return {} if self.calibration is None else self.calibration.tensors()

    def _read_base(self, expected: Mapping[str, tuple[int, ...]]) -> tuple[Lookup, list[str]]:
        if self.options.dummy or self.source.directory is None:
            return dummy_lookup(expected, self.device, self.dtype, self.engine.seed)
        return checkpoint_lookup(self.source.directory, expected, self._config)

    def _base_weights(self, programs: _Programs, directory: Path | None) -> BaseWeights:
        expected = programs.module.checkpoint_tensors()
        return BaseWeights(directory, lambda: self._read_base(expected)[0], self.device, self.engine.seed)

    def _make_stacks(self, programs: _Programs) -> dict[str, torch.Tensor]:
        specs = programs.stack_specs
        return self.sleeper.make_stacks(specs) if self.sleeper else _zeros(specs, self.device)

    def _slot_loader(self, lora: LoraShape, programs: _Programs, stacks: dict[str, torch.Tensor]) -> SlotLoader:
        base, max_cpu_loras = self._base_weights(programs, self.source.directory), self.engine.max_cpu_loras
        loader = SlotLoader(programs.stack_recipes, stacks, self.registry, lora, max_cpu_loras, self._constants, base)
        if self.sleeper:
            self.sleeper.before_sleep = loader.forget_slots
        return loader

    def _make_cache(
        self, specs: Specs, host_pages: int
    ) -> tuple[dict[str, torch.Tensor], PageCopier | PageReader | None, int]:
        """Return the KV caches by name, what copies their pages, and the number of its host pages."""
        transfer = self.options.transfer
        is_copied = bool(host_pages) or transfer is not None
        allocated = stacked_specs(specs) if is_copied else specs
        caches = self.sleeper.make_cache(allocated) if self.sleeper else _zeros(allocated, self.device)
        if not is_copied:
            return caches, None, 0
        with (
            self._timed("host_memory"),
            stage("page-locking host memory for the KV cache", self.engine.show_progress),
        ):
            copier, host_pages = _page_copier(list(caches.values()), host_pages, self.device, transfer)
        return unstacked(specs, caches), copier, host_pages

    def _make_runner(
        self,
        programs: _Programs,
        tensors: dict[str, torch.Tensor],
        slot_loader: SlotLoader | None,
        copier: PageCopier | PageReader | None,
    ) -> ModelRunner:
        buckets, device, engine, history = programs.buckets, self.device, self.engine, None
        draft = None if programs.draft is None else programs.draft.bind(tensors, programs.largest, buckets, device)
        if engine.speculation != "off":
            sizes = self.sizes.max_num_seqs, self.sizes.max_model_len
            history = TokenHistory(*sizes, device, engine.speculation_history, draft)
        return ModelRunner(
            programs.compiled,
            tensors,
            buckets,
            device,
            slot_loader=slot_loader,
            vocabulary=self.source.config.vocab_size,
            enforce_eager=engine.enforce_eager,
            fail_on_compilation=engine.fail_on_compilation,
            arena_bytes=programs.largest.arena_bytes,
            token_history=history,
            page_copier=copier,
            processed_logprobs=engine.logprobs_mode != RAW_LOGPROBS,
        )

    def _limits(self, num_pages: int, host_pages: int, runner: ModelRunner) -> SchedulerLimits:
        step_times: tuple[tuple[int, int, float], ...] = ()
        if self.engine.speculation == "auto":
            with self._timed("step_times"):
                step_times = runner.measure_step_times()
        cascade_tile, cascade_pages = self._cascade
        return SchedulerLimits(
            num_pages,
            self.sizes.max_model_len,
            self.sizes.max_num_seqs,
            self.sizes.max_num_batched_tokens,
            0 if self.lora is None else self.lora.slots,
            self.engine.enable_prefix_caching,
            speculation=self.engine.speculation,
            step_times=step_times,
            speculation_history=self.engine.speculation_history,
            host_pages=host_pages,
            exact=self.compiler_options.exact,
            cascade_tile=cascade_tile,
            cascade_pages=cascade_pages,
            kv_role="" if self.options.transfer is None else self.options.transfer.role,
        )

    def _open_page_files(self, model: Model, programs: _Programs, copier: PageCopier, cache_specs: Specs) -> None:
        """Keep KV pages in files that only engines with the same numbers, weights and shapes of pages read."""
        directories = [self.source.directory, *([] if programs.draft is None else [Path(self.engine.draft)])]
        stamps = [self._base_weights(programs, each).stamp for each in directories]
        shapes = [(shape[0], *shape[2:], dtype) for shape, dtype in stacked_specs(cache_specs).values()]
        rank_and_targets = None if self.lora is None else replace(self.lora, slots=1).key
        parts = [model.numerics, asdict(self._config), rank_and_targets, stamps, shapes]
        copier.files = files = open_page_files(copier.pages, self.engine, self.compiler_options, parts)
        model.limits = replace(model.limits, disk_pages=files.max_files, disk_prefix=files.folder.prefix)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin


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


def _zeros(specs: Specs, device: torch.device) -> dict[str, torch.Tensor]:
    """Return zeros: uninitialized memory could hold a NaN, which a masked product would propagate."""
    return {
        name: torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
        for name, (shape, dtype) in specs.items()
    }


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
