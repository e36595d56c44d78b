"""Memory and step times of a model by its config, without a GPU: docs/sizing.md has the formulas.

One and two layers are compiled on the meta device; the others are like the second. If a mixture of experts has dense
layers, a model whose second layer is dense is compiled too.
"""

from dataclasses import replace
from typing import Any

from ...compiler.api import compile_model
from ...compiler.cost.bytes_and_flops import Assumptions
from ...compiler.cost.estimate import estimate, total_seconds
from ...compiler.cost.hardware import Gpu
from ...compiler.options import CompileOptions
from ...compiler.program.program import Bucket, Program
from ...graphs.config import LlamaConfig
from ...graphs.llama import Llama
from ...graphs.lora import LoraShape
from ...ops.core.kv_layout import PAGE_SIZE, pages_for
from ...runtime.worker.memory_budget import (
    SAMPLING_COPIES,
    MemoryDemand,
    expert_bytes,
    kv_specs,
    nbytes,
    specs_of,
)

PROMPT_TOKENS = 2048
"""Tokens of the step whose time gives the rate of prompts."""


class SizedModel:
    """A model of `config` with stacks for adapters of the shape `lora`; None: without adapters."""

    def __init__(self, config: LlamaConfig, lora: LoraShape | None, options: CompileOptions) -> None:
        self.config, self.lora = config, lora
        self._dense = config.num_hidden_layers - config.num_sparse_layers if config.num_experts else 0
        self._compiled: list[Any] = []
        for depth, dense in ((1, ()), (2, ()), (2, (1,)))[: 3 if self._dense else 2]:
            layers = replace(config, num_hidden_layers=depth, dense_layers=dense)
            model = Llama(layers, lora, options.model_dtype, device="meta")
            self._compiled.append(compile_model(model, options, text=False))

    def _programs(self, bucket: Bucket) -> list[Program]:
        return [compiled.program(bucket) for compiled in self._compiled]

    def _scaled(self, one: float, two: float, dense: float = 0) -> float:
        """Return the figure of all layers from those of the compiled models."""
        alike = self.config.num_hidden_layers - self._dense
        return one + (alike - 1) * (two - one) + self._dense * (dense - one)

    def demand(self, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> MemoryDemand:
        """Return the bytes of an engine. Temporaries of layers share memory, so activations are those of two layers."""
        blocks = pages_for(max_model_len)
        sizes = max_num_batched_tokens, max_num_seqs, blocks * max_num_seqs, blocks
        programs = self._programs(Bucket(*sizes, lora=self.lora is not None))
        slots = 1 if self.lora is None else self.lora.slots

        def scaled(specs: Any, count: Any = nbytes) -> int:
            return round(self._scaled(*(count(specs(program)) for program in programs)))

        return MemoryDemand(
            weights=scaled(lambda program: specs_of(program, "weight")),
            adapters=scaled(lambda program: specs_of(program, "adapter")) * (slots + 1) // slots,
            activations=max(program.arena_bytes for program in programs)
            + SAMPLING_COPIES * max_num_seqs * self.config.vocab_size * 4,
            page=scaled(lambda program: kv_specs(program, 1)),
            slots=slots + 1,
            expert_slot=scaled(lambda program: specs_of(program, "adapter"), expert_bytes) // slots,
        )

    def decode_seconds(self, sequences: int, context: int, adapters: int, gpu: Gpu) -> float:
        """Return the time of a step with one token of each sequence. `context`: cached tokens of each."""
        blocks = context // PAGE_SIZE + 1
        bucket = Bucket(sequences, sequences, sequences * blocks, blocks, decode=True, lora=self.lora is not None)
        return self.seconds(bucket, context, adapters, gpu)

    def prompt_seconds(self, tokens: int, gpu: Gpu) -> float:
        """Return the time of a prompt token in prompts of this length."""
        blocks = pages_for(tokens)
        count = max(1, PROMPT_TOKENS // tokens)
        bucket = Bucket(count * tokens, count, count * blocks, blocks, lora=self.lora is not None)
        return self.seconds(bucket, tokens // 2, count, gpu) / (count * tokens)

    def seconds(self, bucket: Bucket, context: int, adapters: int, gpu: Gpu) -> float:
        """Return the time of a step. `context`: cached tokens of a sequence; `adapters`: those of the batch."""
        assume = Assumptions(context, adapters)
        times = (total_seconds(estimate(program, assume, gpu)) for program in self._programs(bucket))
        return self._scaled(*times)
