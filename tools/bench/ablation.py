"""Time a decode layer with one optimisation off, or exchanged for another choice, at a time.

`sidestream bench latency --ablate`. Each arm compiles a model of Llama-3.1-8B's shape again and times a layer as
`layer` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from ..options.environment import write_figures
from ..options.models import zipf
from .layer import DEPTHS, Layers, Variant, layer_us

SHARES = (0.1, 0.25, 0.5)


@dataclass(frozen=True)
class Arm:
    """A change to the compiler's options; `lora`: steps with adapters are measured too ("both"), "only", or "never"."""

    name: str
    change: dict[str, Any] = field(default_factory=dict)
    lora: str = "both"

    def applies(self, lora: bool) -> bool:
        """Return whether the arm changes steps with (without) adapters."""
        return self.lora == "both" or (self.lora == "only") == lora


def todays_name(arm: str) -> str:
    """Return an arm's present name for a former one in raw output."""
    return arm.replace("LoRA beside the base", "LoRA next to the base")


def arms() -> list[Arm]:
    """Return the arm without changes, then one arm for each change."""
    from ...compiler.options import LoraLowering
    from ...compiler.pipeline import PASSES, STATIC_PASSES

    fusions = [
        each.name
        for each in (*PASSES, *STATIC_PASSES)
        if each.name.startswith(("fuse_", "pack_", "lift_rope_angles", "quantize_in_", "round_"))
    ]
    lowerings = [name for name in get_args(LoraLowering) if name != "auto"]
    return [
        Arm("everything on"),
        Arm("no programmatic dependent launch", {"pdl": False}),
        *(Arm(f"without {name}", {"disable": (name,), "check_counts": False}) for name in dict.fromkeys(fusions)),
        *(Arm(f"LoRA as {name}", {"lora_lowering": name}, "only") for name in lowerings),
        *(
            Arm(
                f"LoRA next to the base on {part:.0%} of the SMs",
                {"lora_lowering": "side_stream", "lora_sm_share": part},
                "only",
            )
            for part in SHARES
        ),
        Arm("LoRA stacks in 16 bits", {"lora_dtype": "bf16"}, "only"),
        Arm("LoRA stacks in eight bits, their input in 16", {"lora_input": "bf16"}, "only"),
        Arm("no rotation of Q and K", {"hadamard": False}),
        Arm("no rotation of activations", {"rotate_activations": False}),
        Arm("no balance of Q and K", {"balance_keys": False}),
        Arm("KV cache in e4m3", {"kv_dtype": "fp8_e4m3"}),
        Arm("KV cache in 16 bits", {"kv_dtype": "bf16"}),
        Arm("everything in e4m3, adapters too", {"precision": "fp8", "lora_dtype": "fp8"}),
        Arm("linears in 16 bits", {"disable": ("quantize_linears",), "check_counts": False}),
        Arm("everything in 16 bits", {"precision": "bf16"}),
    ]


@dataclass(frozen=True)
class Row:
    """One line of the table; microseconds per layer, and the difference to the arm without changes."""

    tokens: int
    adapters: int
    arm: str
    us_per_layer: float
    added_us: float


def ablate(
    tokens: Sequence[int],
    rank: int,
    slots: int,
    repeats: int,
    on_row: Callable[[Row], None] = lambda row: None,
    device: str = "cuda",
) -> list[Row]:
    """Time every arm at every number of sequences, without and with adapters mixed by p(k) ~ 1/k.

    `on_row` is called with each row.
    """
    from ...compiler.options import CompileOptions

    rows: list[Row] = []
    whole: dict[tuple[int, bool], float] = {}
    for arm in arms():
        layers = Layers(rank, slots, device, replace(CompileOptions(), **arm.change))
        for count in tokens:
            adapters = zipf(range(slots), count)
            tensors = {depth: layers.tensors(depth, count, adapters) for depth in DEPTHS}
            for lora in (False, True):
                if not arm.applies(lora):
                    continue
                variant = Variant(
                    layers.options.lora_lowering if lora else "none", layers.options.lora_sm_share, layers.options.pdl
                )
                time = layer_us({depth: layers.program(depth, count, variant) for depth in DEPTHS}, tensors, repeats)
                base = whole.setdefault((count, lora), time)
                rows.append(
                    Row(count, len(set(adapters)) if lora else 0, arm.name, round(time, 2), round(time - base, 2))
                )
                on_row(rows[-1])
    return rows


def run(tokens: Sequence[int], rank: int, slots: int, repeats: int, output_json: Path) -> int:
    """Print the table row by row, and write the JSON."""
    print(f"{'C':>4}{'adapters':>10}  {'turned off or exchanged':<44}{'us/layer':>10}{'adds':>8}")
    rows = ablate(tokens, rank, slots, repeats, lambda row: print(line(row), flush=True))
    print("\nus/layer: a decode layer of Llama-3.1-8B's shape, 256 cached tokens per sequence; adds: the difference")
    write_figures(output_json, {"ablation": [asdict(row) for row in rows]})
    return 0


def line(row: Row) -> str:
    """Return a row of the table."""
    return f"{row.tokens:>4}{row.adapters:>10}  {row.arm:<44}{row.us_per_layer:>10.1f}{row.added_us:>+8.1f}"
