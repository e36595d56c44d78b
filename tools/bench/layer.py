"""Time one decode layer of a compiled program, and launches on a GPU.

A model of Llama-3.1-8B's shape with random weights is compiled with two and with six layers and replayed as a CUDA
graph. A quarter of the difference is a layer's time, without embedding, output projection and launch. Sequences have
256 cached tokens.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..options.models import LLAMA_8B

DEPTHS = (2, 6)  # layers of the two programs
CONTEXT = 256  # cached tokens of a sequence
VOCABULARY = 4096


@dataclass(frozen=True)
class Variant:
    """A way to lower LoRA; `sm_share` is that of the side stream (None: the default)."""

    lowering: str
    sm_share: float | None = None
    pdl: bool = True


class Layers:
    """Compiled models of both depths, and tensors that all programs share."""

    def __init__(
        self, rank: int, slots: int, device: str = "cuda", options: Any = None, config: Mapping[str, Any] = LLAMA_8B
    ) -> None:
        import torch

        from ...compiler.api import compile_model
        from ...compiler.options import CompileOptions
        from ...graphs.config import LlamaConfig
        from ...graphs.llama import Llama
        from ...graphs.lora import LoraShape

        self.device = device
        self.options = options or CompileOptions()
        self.models = {}
        for depth in DEPTHS:
            fields = LlamaConfig.from_dict({**config, "vocab_size": VOCABULARY, "num_hidden_layers": depth})
            self.models[depth] = compile_model(
                Llama(fields, LoraShape(slots, rank), torch.bfloat16, "meta"), self.options, text=False
            )
        self._constant: dict[str, Any] = {}
        self._generator = torch.Generator(device).manual_seed(0)

    def bucket(self, tokens: int, lora: bool) -> Any:
        """Return the bucket of a decode step of `tokens` sequences."""
        from ...compiler.program.program import Bucket
        from ...ops.core.kv_layout import PAGE_SIZE

        blocks = CONTEXT // PAGE_SIZE + 1
        return Bucket(tokens, tokens, tokens * blocks, blocks, decode=True, lora=lora)

    def program(self, depth: int, tokens: int, variant: Variant) -> Any:
        """Return the program of one variant."""
        from ...compiler.build_program import build_program

        chosen: dict[str, Any] = {"pdl": variant.pdl}
        if variant.lowering != "none":
            chosen["lora_lowering"] = variant.lowering
        if variant.sm_share is not None:
            chosen["lora_sm_share"] = variant.sm_share
        return build_program(
            self.models[depth].graph_module,
            self.bucket(tokens, variant.lowering != "none"),
            replace(self.options, **chosen),
        )

    def tensors(self, depth: int, tokens: int, adapters: Sequence[int]) -> dict[str, Any]:
        """Return the tensors that the programs of `tokens` sequences bind; weights are made once."""
        import torch

        from ...ops.core.kv_layout import PAGE_SIZE

        bucket = self.bucket(tokens, True)
        specs = self.models[depth].tensor_specs(bucket)
        table = torch.arange(tokens * bucket.blocks).view(tokens, bucket.blocks)
        last = CONTEXT - 1
        integers = {
            "input_ids": torch.arange(tokens) % VOCABULARY,
            "positions": torch.full((tokens,), last),
            "slot_mapping": table[:, last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE,
            "adapter_index": torch.tensor(adapters),
            "block_table": table,
            "context_lens": torch.full((tokens,), CONTEXT),
            "query_start": torch.arange(tokens + 1),
            "logits_indices": torch.arange(tokens),
        }
        made = {name: value.to(self.device, specs[name][1]) for name, value in integers.items() if name in specs}
        for name, (shape, dtype) in specs.items():
            if name not in made:
                known = self._constant.get(name)
                if known is None or tuple(known.shape) != shape:
                    self._constant[name] = known = self._random(name, shape, dtype)
                made[name] = known
        return made

    def _random(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        import torch

        values = torch.randn(shape, device=self.device, generator=self._generator)
        if name.endswith("_scale") or name.startswith("kv_scales"):
            values = values.abs() * 1e-3 + 1e-3
        elif name.startswith("key_balance"):
            values = values.round().exp2()
        elif "norm" in name:
            values = 1 + 0.1 * values
        elif "inv_freq" in name:
            values = values.abs()
        elif "lora" in name or dtype == torch.bfloat16:
            values = values / shape[-1] ** 0.5
        if dtype == torch.int8:
            # like quantized rows of a normal distribution: smaller numbers would draw less power
            values = (values * 36).round().clamp(-127, 127)
        return values.to(dtype)


def replay_us(bound: Any, repeats: int, inner: int = 10) -> float:
    """Return microseconds of one replay: the median of `repeats` rows of `inner` replays, after a warm-up row."""
    return statistics.median([elapsed_us(bound.replay, inner) for _ in range(repeats + 1)][1:])


def layer_us(programs: Mapping[int, Any], tensors: Mapping[int, Mapping[str, Any]], repeats: int) -> float:
    """Return microseconds of a layer from the programs of both depths."""
    from ...compiler.run.bound_program import BoundProgram

    few, many = (
        replay_us(BoundProgram(programs[depth], tensors[depth], "cuda").capture(), repeats) for depth in DEPTHS
    )
    return (many - few) / (DEPTHS[1] - DEPTHS[0])


def elapsed_us(run: Callable[[], Any], count: int = 1) -> float:
    """Return microseconds per call of `run`, over `count` calls."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / count


def captured(launches: Sequence[Callable[[], Any]], rounds: int) -> Any:
    """Return a CUDA graph of `rounds` times all launches, which must be compiled already."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        for _ in range(rounds):
            for launch in launches:
                launch()
    return graph


def launch_us(launches: Sequence[Callable[[], Any]], rounds: int, repeats: int) -> float:
    """Return microseconds per launch of such a graph: the median of `repeats` replays after two warm-up replays."""
    graph = captured(launches, rounds)
    times = [elapsed_us(graph.replay) for _ in range(repeats + 2)]
    return statistics.median(times[2:]) / (rounds * len(launches))
