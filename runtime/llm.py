"""`LLM`: a model with many adapters, in this process."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from ..compiler.api import CompiledModel
from ..compiler.options import DEFAULT_PRECISION, Layers, OptionError
from ..compiler.pipeline import PASSES, Pass, check_disabled
from ..graphs.config import LlamaConfig
from ..graphs.lora import RANK_MULTIPLE, LoraShape
from ..graphs.stack import lora_shape_for
from .adapters.registry import AdapterRegistry
from .adapters.slot_cache import SlotCache
from .demo_model import DEMO_MODEL, demo_adapters
from .device.model import build_runner
from .device.quick_start import collections_paused, wake
from .engine.calibration import Calibration, calibrated
from .engine.engine import Engine
from .engine.options import (
    DEFAULT_MAX_LORAS,
    MAX_RANK,
    EngineOptions,
    check_layers,
    compile_options,
    resolve_device,
    resolve_sizes,
)
from .requests.errors import RequestError
from .requests.outputs import FinishReason, RequestOutput
from .requests.request import Request
from .requests.sampling_params import SamplingParams
from .scheduling.scheduler import Scheduler, SchedulerLimits
from .text.requests import make_requests
from .text.tokenizer import eos_token_ids, load_tokenizer

LOAD_FORMATS = ("auto", "safetensors", "dummy")


class StreamChunk(NamedTuple):
    """What a step added to one prompt's answer: which prompt (its place in the list), the new text and token ids;
    `finish_reason` comes with the last chunk.
    """

    prompt_index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    completion: int = 0


class LLM:
    """A Llama and its LoRA adapters, compiled for this machine and run in this process.

        llm = LLM("path/to/llama", adapters={"poetry": "path/to/adapter"})
        outputs = llm.generate(["To be"], SamplingParams(max_tokens=32), adapter="poetry")

    model            directory in the Hugging Face format (None: the demo model with its adapters); with
                     load_format="dummy" also config.json's fields as a dict
    adapters         name -> directory of a PEFT adapter
    precision        `int8`, `fp8`: weights, activations and KV cache in eight bits; `bf16`, `fp32`: nothing quantized
    kv_cache_dtype   (or kv_dtype) `auto`, `fp8`, `int8`, `bf16`: what the KV cache holds
    hadamard         rotate Q and K before a quantized cache: True, False or layer numbers (None: as calibrated, else
                     everywhere)
    center_keys      subtract the calibrated constant from K before a quantized cache: the same values (None: as
                     calibrated, else nowhere)
    balance_keys     scale K, and Q by the same, so that both are of a size in a quantized cache: True, False or layer
                     numbers
    rotate_values    rotate V by its weights: True, False or layer numbers
    calibration      what `sidestream calibrate` wrote: decides what kv_dtype="auto", hadamard=None and center_keys=None
                     mean (None: the file sidestream_calibration.safetensors beside the checkpoint, if there is one)
    dtype            `auto`, `bfloat16`, `float32`: vLLM's spelling of the unquantized dtype; must agree with precision
    disable_passes   compiler passes to leave out, by name
    passes           the compiler's pass list, for those who add one with `insert_pass`
    lora_dtype, lora_input, lora_lowering, lora_sm_share, rotate_activations, whole_layer, lm_head   see CompileOptions
    load_format      `dummy`: random weights of the model's shape, for measurements
    device           `cuda`, `cuda:1`, `cpu`; None: the GPU if there is one
    max_model_len, max_num_seqs, max_num_batched_tokens, max_loras, max_lora_rank, max_cpu_loras, num_kv_pages,
    gpu_memory_utilization, enforce_eager,
    enable_prefix_caching, show_progress, seed   see EngineOptions

    Raises OptionError, ConfigError, CheckpointError or AdapterError before any weight is loaded, and CapacityError when
    the device is too small. `generate` and `stream` raise RequestError, before anything runs, for a request that cannot
    be served.

    calibration   the Calibration that is in use, or None
    compiled   the CompiledModel: its passes' report, programs and dump
    registry   the adapters by name
    seconds    where the start-up's time went
    """

    compiled: CompiledModel

    def __init__(
        self,
        model: str | Path | Mapping[str, Any] | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        precision: str = DEFAULT_PRECISION,
        kv_dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        hadamard: Layers | None = None,
        dtype: Any = "auto",
        disable_passes: Sequence[str] = (),
        passes: tuple[Pass, ...] = PASSES,
        center_keys: Layers | None = None,
        balance_keys: Layers = True,
        rotate_values: Layers = False,
        calibration: str | Path | Calibration | None = None,
        lora_lowering: str = "auto",
        lora_sm_share: float | None = None,
        whole_layer: str = "auto",
        lm_head: str = "auto",
        load_format: str = "auto",
        lora_dtype: str = "auto",
        lora_input: str = "auto",
        rotate_activations: bool = True,
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        max_cpu_loras: int = 64,
        num_kv_pages: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        enable_prefix_caching: bool = True,
        show_progress: bool = True,
        seed: int = 0,
    ) -> None:
        self.options = EngineOptions(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            max_cpu_loras=max_cpu_loras,
            num_kv_pages=num_kv_pages,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            enable_prefix_caching=enable_prefix_caching,
            show_progress=show_progress,
            seed=seed,
        )
        more = {
            "lora_lowering": lora_lowering,
            "lora_sm_share": lora_sm_share,
            "lm_head": lm_head,
            "whole_layer": whole_layer,
            "rotate_values": rotate_values,
            "lora_dtype": lora_dtype,
            "lora_input": lora_input,
            "rotate_activations": rotate_activations,
            "balance_keys": balance_keys,
        }
        compiler_options = compile_options(
            precision, dtype, kv_dtype, kv_cache_dtype, hadamard, tuple(disable_passes), more, center_keys
        )
        check_disabled(compiler_options, passes)
        if load_format not in LOAD_FORMATS:
            raise OptionError(f"load_format={load_format!r} is not known; choose one of {', '.join(LOAD_FORMATS)}")
        self.device = resolve_device(device)
        wake(self.device)
        if model is None and adapters is None:
            adapters = demo_adapters()
        self.config, directory = _model(DEMO_MODEL if model is None else model, load_format)
        self.calibration, compiler_options = calibrated(
            calibration,
            self.config,
            None if load_format == "dummy" else directory,
            compiler_options,
            hadamard is None,
            center_keys is None,
        )
        check_layers(compiler_options, self.config.num_hidden_layers)
        sizes = resolve_sizes(self.options, self.config.max_position_embeddings, self.device)
        self.registry = AdapterRegistry(
            self.config, max_lora_rank or MAX_RANK, keep=max_cpu_loras, cache=SlotCache.from_environment()
        )
        given = dict(adapters or {})
        for _known in tqdm(
            self.registry.add_all(given),
            desc="Reading adapters",
            unit="adapter",
            total=len(given),
            disable=not (show_progress and given),
            leave=False,
        ):
            pass
        count = len(self.registry.numbers)
        slots = min(count, DEFAULT_MAX_LORAS) if max_loras is None else max_loras
        if slots == 0 and count:
            raise OptionError(
                f"max_loras=0 leaves no room for the {count} adapters given; raise max_loras or leave adapters out"
            )
        if slots and not count and max_lora_rank is None:
            raise OptionError(
                f"max_loras={slots} without adapters: the shape of the stacks follows from them; give at least one "
                f"in adapters={{name: path}}, "
                "or max_lora_rank"
            )
        lora = _lora_shape(self.registry, slots, max_lora_rank) if slots else None
        self.tokenizer = load_tokenizer(directory)
        vocabulary = self.config.vocab_size
        eos_ids = {token for token in eos_token_ids(directory) | set(self.config.eos_token_ids) if token < vocabulary}
        weights = None if load_format == "dummy" else directory
        with collections_paused():
            built = build_runner(
                self.config,
                weights,
                self.options,
                compiler_options,
                sizes,
                self.device,
                self.registry,
                lora,
                passes,
                {} if self.calibration is None else self.calibration.tensors(),
            )
        self.compiled, self.seconds, self.num_pages = built.compiled, built.seconds, built.num_pages
        self._stacks = built.runner.stacks
        limits = SchedulerLimits(
            built.num_pages,
            sizes.max_model_len,
            sizes.max_num_seqs,
            sizes.max_num_batched_tokens,
            slots,
            self.options.enable_prefix_caching,
        )
        scheduler = Scheduler(limits, self.registry.numbers, self.registry.hashes, asynchronous_loads=True)
        self.engine = Engine(scheduler, built.runner, self.tokenizer, eos_ids, seed, overlap=self.device.type == "cuda")
        self._requests = 0
        self._busy = False

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may use."""
        return tuple(self.registry.numbers)

    @property
    def max_model_len(self) -> int:
        """Most tokens that a prompt and its output may come to."""
        return self.engine.scheduler.limits.max_model_len

    def prefetch_adapters(self) -> None:
        """Wait until as many adapters as `max_cpu_loras` allows lie in host memory.

        Without it they get there behind the first requests' backs.
        """
        if self._stacks is not None:
            self._stacks.prefetch(list(self.registry.numbers.values())[: self.options.max_cpu_loras])

    def add_adapter(self, name: str, path: str | Path, replace: bool = False) -> None:
        """Make one more adapter usable, or (`replace`) give a name a new content: requests that are under way finish on
        the former one.

        Raises RequestError or AdapterError, and changes nothing, for one that does not fit what the engine was started
        with.
        """
        if self._stacks is None:
            raise RequestError(
                "the engine was started without adapters; give LLM at least one in adapters={name: path}, or "
                "max_loras and max_lora_rank"
            )
        former = self.registry.numbers.get(name)
        known = self.registry.add(name, path, replace)
        self._stacks.fill([known.number])
        if former is not None:
            self.engine.scheduler.forget_adapter(former)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter: no new request may use it; its slot and its host copy come free when those under way
        are finished.
        """
        self.engine.scheduler.forget_adapter(self.registry.remove(name))

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the prompts' order.

        prompts          text, token ids, a list of either, or dicts {"prompt": text} / {"prompt_token_ids": ids}
        sampling_params  one for all or one a prompt; None: SamplingParams()
        adapter          an adapter's name for all, or one a prompt (None = the base model)
        """
        requests = self._make_requests(prompts, sampling_params, adapter)
        outputs: dict[str, RequestOutput] = {}
        with tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not use_tqdm) as progress:
            before = self.engine.num_sampled
            for _, finished in self._run(requests, stream=False):
                for output in finished:
                    outputs[output.request_id] = output
                    progress.update()
                    progress.set_postfix_str(
                        f"{(self.engine.num_sampled - before) / max(progress.format_dict['elapsed'], 1e-9):.0f} tok/s"
                    )
        return [outputs[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Iterator[StreamChunk]:
        """The same, token by token: chunks of all prompts as they come. Leaving the loop early ends the requests."""
        requests = self._make_requests(prompts, sampling_params, adapter)
        index = {request.request_id: place for place, request in enumerate(requests)}

        def chunks() -> Iterator[StreamChunk]:
            for deltas, _ in self._run(requests, stream=True):
                for delta in deltas:
                    yield StreamChunk(
                        index[delta.request_id],
                        delta.text,
                        delta.token_ids,
                        delta.finish_reason,
                        delta.stop_reason,
                        delta.index,
                    )

        return chunks()

    def _make_requests(self, prompts: Any, sampling_params: Any, adapter: Any) -> list[Request]:
        if self._busy:
            raise RequestError("a stream of this LLM is still open; read it to its end or close() it first")
        requests = make_requests(
            prompts,
            sampling_params,
            adapter,
            tokenizer=self.tokenizer,
            vocabulary=self.config.vocab_size,
            max_model_len=self.max_model_len,
            adapters=self.registry.numbers,
            first=self._requests,
        )
        self._requests += len(requests)
        return requests

    def _run(self, requests: list[Request], stream: bool) -> Iterator[tuple[list[Any], list[RequestOutput]]]:
        """Steps of the engine until all requests are done; whatever interrupts this ends them."""
        if self._busy:
            raise RequestError("a stream of this LLM is still open; read it to its end or close() it first")
        self._busy = True
        try:
            for request in requests:
                self.engine.add(request, stream)
            while self.engine.has_work:
                yield self.engine.step()
        finally:
            self._busy = False
            for request in requests:
                self.engine.abort(request.request_id)
            while self.engine.has_work:
                self.engine.step()


def _lora_shape(registry: AdapterRegistry, slots: int, max_lora_rank: int | None) -> LoraShape | None:
    """Stacks for the adapters that are known, or for any of `max_lora_rank` if none is."""
    if registry.numbers or max_lora_rank is None:
        return lora_shape_for(registry.adapters, slots, max_lora_rank)
    return LoraShape(slots, -(-max_lora_rank // RANK_MULTIPLE) * RANK_MULTIPLE)


def _model(model: str | Path | Mapping[str, Any], load_format: str) -> tuple[LlamaConfig, Path | None]:
    """(config, directory or None) of what the caller named."""
    if isinstance(model, Mapping):
        if load_format != "dummy":
            raise OptionError(
                "a model given as config fields has no weights; add load_format='dummy' for random ones, or name a "
                "model directory"
            )
        return LlamaConfig.from_dict(model), None
    directory = Path(model)
    if not directory.is_dir():
        raise OptionError(
            f"model={str(model)!r} is no directory; download the model first and name the directory that holds its "
            "config.json"
        )
    return LlamaConfig.from_directory(directory), directory
