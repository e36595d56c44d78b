"""Checks of an exact engine (`exact=True`): what it does not support is refused before any weight is loaded."""

from ...compiler.options import OptionError
from ...compiler.program.program import Program
from ...graphs.config import LlamaConfig
from ...graphs.families import VOCABULARY_TARGETS
from ...graphs.lora import LoraShape
from ..api.errors import RequestError
from ..api.sampling_params import RAW_LOGPROBS
from .options import EngineOptions

EXACT_OPS = frozenset(
    {
        *(
            "embedding",
            "rope_angles",
            "rope_append",
            "paged_attention",
            "paged_attention_quant",
            "widen_plan",
            "widen_kv",
        ),
        *("rms_norm", "rms_norm_quant", "add_rms_norm", "add_rms_norm_quant", "quantize_rowwise"),
        *("linear_8bit", "silu_mul", "silu_mul_quant", "lora_plan", "lora_shrink", "lora_expand"),
    }
)
"""Sidestream's ops that give a token the same bits in launches of every size, as `exact` sets their flags."""
EXACT_ATEN = frozenset(["index_select", "add", "mul", "clone", "_to_copy", "to"])
"""ATen's ops that compute each element by itself."""


def check_exact(engine: EngineOptions, config: LlamaConfig) -> None:
    """Raise OptionError for an option or a model that an exact engine does not support."""
    if engine.speculation != "off":
        raise OptionError(
            f"speculation={engine.speculation!r} contradicts exact=True, because steps with drafts round differently; "
            "leave one of them out"
        )
    if engine.logprobs_mode != RAW_LOGPROBS:
        raise OptionError(
            f"logprobs_mode={engine.logprobs_mode!r} contradicts exact=True, since sums of filtered probabilities "
            f"depend on other rows; use logprobs_mode={RAW_LOGPROBS!r}, or leave exact out"
        )
    if config.num_experts:
        raise OptionError(
            f"exact=True does not support mixtures of experts, and the model has {config.num_experts} experts; leave "
            "exact out, or name a dense model"
        )


def check_exact_adapters(lora: LoraShape | None) -> None:
    """Raise OptionError if adapters may have more than LoRA on projections."""
    if lora is not None and lora.varies:
        parts = [*lora.parts, *(name for name in lora.targets if name in VOCABULARY_TARGETS)]
        raise OptionError(
            f"exact=True supports only adapters with LoRA on projections, not with {', '.join(parts)}; leave out these "
            "adapters, or exact"
        )


def check_exact_program(program: Program) -> None:
    """Raise OptionError if a program has an op whose bits may depend on its size."""
    for step in program.steps:
        namespace, _, op = step.op.partition(".")
        known = EXACT_OPS if namespace == "sidestream" else EXACT_ATEN
        if op.partition(".")[0] not in known:
            raise OptionError(
                f"exact=True cannot serve this model: {step.name} is computed by {step.op}, whose bits depend on the "
                "size of a step; leave exact out"
            )


def check_exact_update(name: str, switch: bool) -> None:
    """Raise RequestError if running requests are to switch to another version of an adapter."""
    if switch:
        raise RequestError(
            f"inflight='switch' for adapter {name!r} contradicts exact=True: keys and values of two versions would "
            "depend on preemptions; give inflight='pin'"
        )
