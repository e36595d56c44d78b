"""Sidestream serves many LoRA fine-tunes of one base model from one Hopper GPU.

The names below load on first use, so that `import sidestream` takes milliseconds and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_HOME = {
    "LLM": "runtime.llm",
    "SamplingParams": "runtime.api.sampling_params",
    "StructuredOutputsParams": "runtime.api.structured_outputs",
    "BeamSearchParams": "runtime.api.beam_search",
    "BeamSearchOutput": "runtime.api.beam_search",
    "BeamSearchSequence": "runtime.api.beam_search",
    "RequestOutput": "runtime.api.outputs",
    "CompletionOutput": "runtime.api.outputs",
    "ScoreOutput": "runtime.api.outputs",
    "Logprob": "runtime.api.outputs",
    "RequestMetrics": "runtime.api.outputs",
    "LoRARequest": "runtime.api.lora_request",
    "AdapterVersion": "runtime.api.adapter_versions",
    "VersionConflictError": "runtime.api.adapter_versions",
    "RequestError": "runtime.api.errors",
    "CapacityError": "runtime.api.errors",
    "ServerError": "runtime.api.errors",
    "EngineDeadError": "runtime.api.errors",
    "OverloadedError": "runtime.api.errors",
    "DeadlineError": "runtime.api.errors",
    "EngineOptions": "runtime.engine.options",
    "Client": "runtime.client.client",
    "AsyncClient": "runtime.client.async_client",
    "compile": "compiler.api:compile_model",
    "CompiledModel": "compiler.api",
    "CompileOptions": "compiler.options",
    "OptionError": "compiler.options",
    "straight_through": "runtime.straight_through",
}
__all__ = [  # noqa: RUF022  in the order of _HOME
    "__version__",
    "LLM",
    "SamplingParams",
    "StructuredOutputsParams",
    "BeamSearchParams",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "RequestOutput",
    "CompletionOutput",
    "ScoreOutput",
    "Logprob",
    "RequestMetrics",
    "LoRARequest",
    "AdapterVersion",
    "VersionConflictError",
    "RequestError",
    "CapacityError",
    "ServerError",
    "EngineDeadError",
    "OverloadedError",
    "DeadlineError",
    "EngineOptions",
    "Client",
    "AsyncClient",
    "compile",
    "CompiledModel",
    "CompileOptions",
    "OptionError",
    "straight_through",
]

if TYPE_CHECKING:
    from .compiler.api import CompiledModel
    from .compiler.api import compile_model as compile
    from .compiler.options import CompileOptions, OptionError
    from .runtime.api.adapter_versions import AdapterVersion, VersionConflictError
    from .runtime.api.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from .runtime.api.errors import (
        CapacityError,
        DeadlineError,
        EngineDeadError,
        OverloadedError,
        RequestError,
        ServerError,
    )
    from .runtime.api.lora_request import LoRARequest
    from .runtime.api.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, ScoreOutput
    from .runtime.api.sampling_params import SamplingParams
    from .runtime.api.structured_outputs import StructuredOutputsParams
    from .runtime.client.async_client import AsyncClient
    from .runtime.client.client import Client
    from .runtime.engine.options import EngineOptions
    from .runtime.llm import LLM
    from .runtime.straight_through import straight_through
else:  # a type checker reports names that there are not

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'sidestream' has no attribute {name!r}")
        module, _, attribute = _HOME[name].partition(":")
        value = getattr(import_module(f"sidestream.{module}"), attribute or name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
