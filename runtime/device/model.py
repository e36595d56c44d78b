"""From a model directory to a runner: compile, check the memory, load the weights, bind the programs."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from ...compiler.api import CompiledModel, compile_model
from ...compiler.build import ProgramStore
from ...compiler.graph.recipe import Recipe
from ...compiler.options import CompileOptions
from ...compiler.pipeline import PASSES, Pass, pass_names
from ...compiler.program.cache import ProgramCache, cache_directory
from ...compiler.program.program import Program
from ...graphs.config import LlamaConfig
from ...graphs.llama import Llama
from ...graphs.lora import LoraShape
from ..adapters.registry import AdapterRegistry
from ..adapters.stacks import AdapterStacks
from ..engine.options import EngineOptions, EngineSizes
from .buckets import Buckets
from .capacity import Demand, nbytes, plan_cpu_pages, plan_pages, sampling_bytes
from .runner import ModelRunner
from .weights import checkpoint_lookup, dummy_lookup, load_weights


@dataclass
class Built:
    """A runner and what it was made from; `seconds` tells where the start-up's time went."""

    runner: ModelRunner
    compiled: CompiledModel
    num_pages: int
    seconds: dict[str, float] = field(default_factory=dict)


def build_runner(
    config: LlamaConfig,
    directory: Path | None,
    options: EngineOptions,
    compiler_options: CompileOptions,
    sizes: EngineSizes,
    device: torch.device,
    registry: AdapterRegistry,
    lora: LoraShape | None,
    passes: tuple[Pass, ...] = PASSES,
    calibration: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Built:
    """Everything on the device, ready to run. `directory` None: random weights. Raises CapacityError when it does not
    fit.

    `calibration`: tensors that recipes name and no checkpoint holds. Programs of a pass list other than the compiler's
    own are not kept between runs: the key of a kept program knows passes by name only.
    """
    seconds: dict[str, float] = {}
    dtype = compiler_options.model_dtype
    with _timed(seconds, "capture_and_passes"):
        model = Llama(config, lora, dtype=dtype, device="meta")
        cache = _program_cache(config, lora, compiler_options) if passes == PASSES else None
        compiled = compile_model(model, compiler_options, passes=passes, cache=cache)
        largest = compiled.program(_buckets(sizes, sizes.blocks, lora is not None, device).largest())
    num_pages = _plan_pages(largest, config, options, sizes, device)
    buckets = _buckets(sizes, num_pages, lora is not None, device)
    with _timed(seconds, "load"):
        expected = model.checkpoint_tensors()
        if directory is None:
            lookup, names = dummy_lookup(expected, device, dtype, options.seed)
        else:
            lookup, names = checkpoint_lookup(directory, expected, config.tie_word_embeddings, device, dtype)
        tensors = load_weights(
            _recipes(largest, "weight"),
            lookup,
            names,
            {**model.derived_tensors(), **calibration},
            device,
            options.show_progress,
        )
    stack_tensors = _zeros(_specs(largest, "adapter"), device)
    stacks = (
        None
        if lora is None
        else AdapterStacks(_recipes(largest, "adapter"), stack_tensors, registry, lora, options.max_cpu_loras)
    )
    tensors.update(stack_tensors)
    tensors.update(_zeros(_kv_specs(largest, num_pages), device))
    runner = ModelRunner(
        compiled,
        tensors,
        buckets,
        device,
        stacks=stacks,
        vocabulary=config.vocab_size,
        enforce_eager=options.enforce_eager,
        arena_bytes=largest.arena_bytes,
    )
    if stacks is not None:
        registry.lora = lora
        # on a thread of its own, while graphs are captured
        stacks.fill(list(registry.numbers.values())[: options.max_cpu_loras])
    seconds["programs_and_graphs"] = runner.warm_up(options.show_progress)
    return Built(runner, compiled, num_pages, seconds)


def _plan_pages(
    program: Program, config: LlamaConfig, options: EngineOptions, sizes: EngineSizes, device: torch.device
) -> int:
    """How many KV pages there will be; `program` is the one that needs the most memory."""
    page = nbytes(_kv_specs(program, 1))
    if options.num_kv_pages is not None:
        return options.num_kv_pages
    if device.type == "cpu":
        return plan_cpu_pages(page, sizes.max_model_len, sizes.max_num_seqs)
    activations = program.arena_bytes + sampling_bytes(sizes.max_num_seqs, config.vocab_size)
    stacks = _specs(program, "adapter")
    slots = next((shape[0] for shape, _ in stacks.values()), 1)
    # one slot more: `slot_copy`'s buffer
    demand = Demand(nbytes(_specs(program, "weight")), nbytes(stacks) * (slots + 1) // slots, activations, page)
    free, total = torch.cuda.mem_get_info(device)
    return plan_pages(demand, free, total, options.gpu_memory_utilization, sizes.max_model_len, sizes.max_num_seqs)


def _program_cache(config: LlamaConfig, lora: LoraShape | None, options: CompileOptions) -> ProgramCache:
    parts = {"config": asdict(config), "lora": None if lora is None else asdict(lora)}
    return ProgramCache(ProgramStore(cache_directory() / "programs"), parts, options, pass_names())


def _buckets(sizes: EngineSizes, pages: int, lora: bool, device: torch.device) -> Buckets:
    return Buckets(
        sizes.max_num_seqs, sizes.max_num_batched_tokens, pages, sizes.blocks, lora, rounded=device.type == "cpu"
    )


def _recipes(program: Program, kind: str) -> dict[str, Recipe]:
    """Buffer name -> recipe of a program's weights or adapter stacks."""
    return {buffer.name: program.recipes[buffer.name] for buffer in program.of_kind(kind)}


def _specs(program: Program, kind: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {buffer.name: (buffer.shape, buffer.dtype) for buffer in program.of_kind(kind)}


def _kv_specs(program: Program, pages: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every layer's KV cache and scales, with `pages` pages."""
    specs = _specs(program, "input")
    return {
        name: ((pages, *shape[1:]), dtype)
        for name, (shape, dtype) in specs.items()
        if name.startswith(("kv_caches", "kv_scales"))
    }


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
