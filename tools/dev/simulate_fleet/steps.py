"""Time of a decode step of Llama-3.1-8B with adapters, by the cost model."""

from dataclasses import dataclass

import numpy as np

from ....compiler.cost.hardware import Gpu
from ....compiler.options import CompileOptions
from ....compiler.program.program import Bucket
from ....graphs.config import LlamaConfig
from ....graphs.lora import LoraShape
from ....ops.core.kv_layout import PAGE_SIZE
from ...options.models import LLAMA_8B
from ...options.sizing import SizedModel

CONTEXT = 1024
SEQUENCES = (1, 16, 64, 128, 256)
ADAPTERS = (1, 8, 32)
PROMPT_TOKENS = 512


@dataclass(frozen=True)
class StepTimes:
    """decode  seconds of a step: rows for `SEQUENCES`, columns for `ADAPTERS` (different ones in the batch)
    prompt  seconds per token of a prompt, in chunks of `PROMPT_TOKENS`
    """

    decode: tuple[tuple[float, ...], ...]
    prompt: float

    def step(self, sequences: int, adapters: int) -> float:
        """Return seconds, linear between the estimates."""
        by_adapters = [float(np.interp(sequences, SEQUENCES, column)) for column in zip(*self.decode, strict=True)]
        return float(np.interp(adapters, ADAPTERS, by_adapters))


def estimated(gpu: Gpu) -> StepTimes:
    """Estimate for engines with a `gpu` each, without a GPU."""
    model = SizedModel(LlamaConfig.from_dict(LLAMA_8B), LoraShape(max(ADAPTERS), 16), CompileOptions())
    decode = tuple(
        tuple(model.decode_seconds(sequences, CONTEXT, adapters, gpu) for adapters in ADAPTERS)
        for sequences in SEQUENCES
    )
    blocks = CONTEXT // PAGE_SIZE + 1
    prompt = model.seconds(Bucket(PROMPT_TOKENS, 1, blocks, blocks), CONTEXT, 1, gpu)
    return StepTimes(decode, prompt / PROMPT_TOKENS)
