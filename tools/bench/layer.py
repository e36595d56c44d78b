"""One decode layer of a compiled program, in microseconds: what LoRA, its lowering, its share of the SMs and PDL each
cost or bring.

A model of Llama-3.1-8B's shape with random weights is compiled with two and with six layers and replayed as a CUDA
graph; a quarter of the difference is a layer's time, so embedding, output projection and launch are left out. Sequences
hold 256 tokens, adapters are mixed as in `bench latency`. Run as `python -m sidestream.tools.bench.layer`; needs a GPU.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...compiler.options import DEFAULT_PRECISION
from ..options.engine import positive, share
from ..options.environment import collect
from ..options.models import LLAMA_8B, pick_adapters
from .gpu_time import elapsed_us

DEPTHS = (2, 6)  # layers of the two programs
CONTEXT = 256  # cached tokens of a sequence
VOCABULARY = 4096
LOWERINGS = ("none", "serial", "side_stream", "auto")


@dataclass(frozen=True)
class Variant:
    """A way to lower LoRA; `sm_share` is for the side stream alone (None: the default)."""

    lowering: str
    sm_share: float | None = None
    pdl: bool = True

    @property
    def name(self) -> str:
        """As the table has it."""
        return (
            self.lowering
            + ("" if self.sm_share is None else f" {self.sm_share:.0%}")
            + ("" if self.pdl else ", no PDL")
        )


@dataclass(frozen=True)
class Row:
    """One line of the table; microseconds a layer."""

    tokens: int
    active_adapters: int
    rank: int
    variant: str
    us_per_layer: float
    base_share: float


class Layers:
    """The compiled models of both depths and their tensors, shared by every program."""

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
        """A decode step of `tokens` sequences."""
        from ...compiler.program.program import Bucket
        from ...ops.core.kv_layout import PAGE_SIZE

        blocks = CONTEXT // PAGE_SIZE + 1
        return Bucket(tokens, tokens, tokens * blocks, blocks, decode=True, lora=lora)

    def program(self, depth: int, tokens: int, variant: Variant) -> Any:
        """The program of one variant."""
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
        """Every tensor that the programs of `tokens` sequences bind; weights are made once."""
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
            # as rows of a normal distribution are stored: small numbers would draw less power
            values = (values * 36).round().clamp(-127, 127)
        return values.to(dtype)


def replay_us(bound: Any, repeats: int, inner: int = 10) -> float:
    """Microseconds of one replay: the median of `repeats` rows of `inner` replays, after one that warms up."""
    return statistics.median([elapsed_us(bound.replay, inner) for _ in range(repeats + 1)][1:])


def layer_us(programs: Mapping[int, Any], tensors: Mapping[int, Mapping[str, Any]], repeats: int) -> float:
    """Microseconds of a layer from the programs of both depths."""
    from ...compiler.run.bound_program import BoundProgram

    few, many = (
        replay_us(BoundProgram(programs[depth], tensors[depth], "cuda").capture(), repeats) for depth in DEPTHS
    )
    return (many - few) / (DEPTHS[1] - DEPTHS[0])


def variants(lowerings: Sequence[str], shares: Sequence[float], without_pdl: bool) -> list[Variant]:
    """Every variant that the options name; the SM share multiplies the side stream's alone."""
    found = [Variant(lowering) for lowering in lowerings]
    found += [Variant("side_stream", sm_share) for sm_share in shares]
    return found + [replace(variant, pdl=False) for variant in found if without_pdl and variant.sm_share is None]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m sidestream.tools.bench.layer", description=__doc__)
    made.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[1, 8, 16, 64, 128, 256],
        metavar="T",
        help="sequences in a step (default: %(default)s)",
    )
    made.add_argument(
        "--lowering",
        nargs="+",
        choices=LOWERINGS,
        default=list(LOWERINGS),
        help="how LoRA is lowered (default: all)",
    )
    made.add_argument(
        "--sm-share",
        type=share,
        nargs="*",
        default=[],
        metavar="S",
        help="also the side stream with these shares of the SMs",
    )
    made.add_argument("--no-pdl", action="store_true", help="also everything without programmatic dependent launch")
    made.add_argument(
        "--lora-rank", type=positive, default=32, metavar="R", help="rank of the adapters (default: %(default)s)"
    )
    made.add_argument(
        "--num-adapters",
        type=positive,
        default=8,
        metavar="N",
        help="resident adapters, mixed by p(k) ~ 1/k (default: %(default)s)",
    )
    made.add_argument(
        "--precision",
        choices=("int8", "fp8", "bf16"),
        default=DEFAULT_PRECISION,
        help="of weights and activations (default: %(default)s)",
    )
    made.add_argument(
        "--lora-dtype",
        choices=("auto", "bf16", "int8", "fp8"),
        default="auto",
        help="of the adapters",
    )
    made.add_argument(
        "--repeats", type=positive, default=7, metavar="N", help="timed rows; the median counts (default: %(default)s)"
    )
    made.add_argument("--output-json", type=Path, metavar="FILE", help="also write the figures here")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints the table."""
    from ...compiler.options import CompileOptions

    options = parser().parse_args(arguments)
    layers = Layers(
        options.lora_rank,
        options.num_adapters,
        options=CompileOptions(precision=options.precision, lora_dtype=options.lora_dtype),
    )
    names = [str(slot) for slot in range(options.num_adapters)]
    rows = []
    print(f"{'tokens':>6}{'adapters':>10}  {'LoRA':<24}{'us/layer':>10}{'of none':>9}")
    for tokens in options.tokens:
        adapters = [int(name) for name in pick_adapters("zipf", names, tokens, 0) if name is not None]
        tensors = {depth: layers.tensors(depth, tokens, adapters) for depth in DEPTHS}
        base = None
        for variant in variants(options.lowering, options.sm_share, options.no_pdl):
            time = layer_us(
                {depth: layers.program(depth, tokens, variant) for depth in DEPTHS}, tensors, options.repeats
            )
            base = time if variant == Variant("none") else base
            rows.append(
                Row(
                    tokens,
                    len(set(adapters)),
                    options.lora_rank,
                    variant.name,
                    round(time, 2),
                    round((base or time) / time, 3),
                )
            )
            print(
                f"{tokens:>6}{rows[-1].active_adapters:>10}  "
                f"{variant.name:<24}{time:>10.1f}{rows[-1].base_share:>9.0%}",
                flush=True,
            )
    if options.output_json is not None:
        options.output_json.write_text(
            json.dumps({"rows": [asdict(row) for row in rows], "environment": collect()}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
