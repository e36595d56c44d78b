"""A loaded model on its device: its adapters, its runner, and what its numbers depend on."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from ...compiler.api import CompiledModel
from ...compiler.program.cache import source_hash
from ...graphs.config import LlamaConfig
from ...graphs.files.update_file import UpdateFile
from ..adapters.registry import AdapterRegistry, RegisteredAdapter
from ..api.errors import RequestError
from ..engine.exact import check_exact_update
from ..engine.resolve import LoadOptions
from ..quantization.calibration import Calibration
from ..quantization.rounded_weights import Rounding
from ..scheduler.limits import SchedulerLimits
from ..scheduler.step_plan import Runner
from ..text.generation_config import eos_token_ids
from .model_runner import ModelRunner
from .sleep import SleepControl, Sleeper
from .transfer.page_reader import PageReader
from .transfer.page_writer import PageWriter


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
        self, name: str, file: UpdateFile, version: int | None = None, switch: bool = False
    ) -> tuple[RegisteredAdapter, list[int]]:
        """Make an update the newest version of an adapter. Return it, and the numbers of
        adapters that have no name any more. `switch`: running requests are to go on with it.

        Raises errors as `add_adapter` does, and VersionConflictError; the adapters are then unchanged.
        """
        update = self.stage_update(name, file, version, switch)
        try:
            return update, self.publish_update(update)
        except BaseException:
            self.drop_update(update.number)
            raise

    def stage_update(self, name: str, file: UpdateFile, version: int | None, switch: bool) -> RegisteredAdapter:
        """Read an update into host memory, without a name yet; see `update_adapter`."""
        if self.runner.slot_loader is None:
            raise RequestError(
                "the engine was started without adapters; give at least one in adapters={name: path}, or "
                "max_loras and max_lora_rank"
            )
        update = self.registry.add_version(name, file, version)
        try:
            if self.limits.exact:
                check_exact_update(name, switch)
            if switch and update.adapter.invocation:
                raise RequestError(
                    f"adapter {name!r} is an aLoRA adapter, which is active from a token of the prompt on, so running "
                    "requests cannot switch to it; give inflight='pin'"
                )
            self.runner.slot_loader.prefetch([update.number])
            return self.registry.with_hash(update)
        except BaseException:
            self.drop_update(update.number)
            raise

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
