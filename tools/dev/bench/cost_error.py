"""Compare the cost model's estimates of whole decode steps with figures of `sidestream bench latency`, without a GPU.

    python -m sidestream.tools.dev.bench.cost_error docs/measurements/bench_latency_h200.json -o
        docs/measurements/cost_check_h200

Writes PREFIX.txt (also printed) and PREFIX.json. `sidestream inspect dump --measure` times single steps.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from ....compiler.api import compile_model
from ....compiler.cost.bytes_and_flops import Assumptions
from ....compiler.cost.estimate import estimate, total_seconds
from ....compiler.cost.hardware import H200, gpu_named
from ....compiler.options import DEFAULT_LORA_DTYPE, CompileOptions, LoraDtype
from ....compiler.pass_records import columns
from ....compiler.program.program import Bucket
from ....graphs.config import LlamaConfig
from ....graphs.llama import Llama
from ....graphs.lora import LoraShape
from ....ops.core.kv_layout import pages_for
from ...bench.latency import SHORT_OUTPUT
from ..command_line import dev_parser


@dataclass(frozen=True)
class WholeStep:
    """A decode step of `concurrency` sequences in milliseconds; `measured` includes sampling and pauses of the host."""

    lora: str
    concurrency: int
    adapters: int
    kernels: int
    estimated: float
    measured: float

    @property
    def error(self) -> float:
        """Return the relative error of the estimate."""
        return self.estimated / self.measured - 1


def whole_steps(
    bench: dict[str, Any], layers: int | None = None, lora_dtype: LoraDtype = "auto"
) -> tuple[list[WholeStep], int]:
    """Return (present estimates next to the rows of a `sidestream bench latency` JSON, cached tokens per sequence).

    The cached tokens are those in the middle of the timed steps.
    """
    asked = bench["options"]
    fields = {**bench["config"], "num_hidden_layers": layers or bench["config"]["num_hidden_layers"]}
    gpu = gpu_named(bench["environment"]["gpus"][0]["name"]) if bench["environment"]["gpus"] else H200
    chosen = CompileOptions(
        precision=asked["precision"],
        kv_dtype=asked["kv_cache_dtype"],
        disable=tuple(asked["disable_pass"]),
        lora_dtype=lora_dtype,
    )
    adapters = LoraShape(asked["num_adapters"], asked["lora_rank"])
    model = Llama(LlamaConfig.from_dict(fields), adapters, chosen.model_dtype, device="meta")
    compiled = compile_model(model, chosen, text=False)
    context = asked["input_len"] + (SHORT_OUTPUT + asked["output_len"]) // 2
    blocks, found = pages_for(asked["input_len"] + asked["output_len"]), []
    for row in bench["rows"]:
        count, lora = row["concurrency"], row["lora"] != "none"
        program = compiled.program(Bucket(count, count, count * blocks + 1, blocks, decode=True, lora=lora))
        seconds = total_seconds(estimate(program, Assumptions(context, row["active_adapters"] or None), gpu))
        found.append(
            WholeStep(row["lora"], count, row["active_adapters"], len(program.steps), seconds * 1e3, row["ms_per_step"])
        )
    return found, context


def whole_steps_text(found: Sequence[WholeStep], bench: dict[str, Any], context: int, held: str) -> str:
    """Return the published table."""
    gpus, packages = bench["environment"]["gpus"], bench["environment"]["packages"]
    layers = bench["config"]["num_hidden_layers"]
    rows = [("lora", "C", "adapters", "kernels", "estimated ms", "measured ms", "error")]
    for each in found:
        counts = (str(each.concurrency), str(each.adapters), str(each.kernels))
        rows.append((each.lora, *counts, f"{each.estimated:.3f}", f"{each.measured:.3f}", f"{each.error:+.1%}"))
    mean, worst = statistics.mean(abs(each.error) for each in found), max((each.error for each in found), key=abs)
    return (
        "The cost model's whole decode steps against `sidestream bench latency` on: "
        f"{gpus[0]['name'] if gpus else 'a CPU'}; "
        f"torch {packages['torch']}, triton {packages['triton']}\n"
        f"{bench['model']}, {layers} layers, adapters of rank {bench['options']['lora_rank']} in {held}, {context} "
        "cached tokens a sequence.\n"
        "The estimate is of the program alone; the measurement also holds the choice of tokens, copies and the "
        "host's pauses between steps.\n"
        "The constants were fitted to these rows together with the ablation's (compiler/cost/kernel_costs.py); "
        "estimated changes: docs/measurements/estimated_changes.txt.\n"
        f"Mean error {mean:.1%}, largest {worst:+.1%}.\n\n{columns(rows, right=range(1, 7))}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the table."""
    parser = dev_parser("bench.cost_error", __doc__)
    parser.add_argument("steps", type=Path, metavar="FILE", help="figures of `sidestream bench latency`")
    parser.add_argument("-o", "--output", type=Path, metavar="PREFIX", help="write PREFIX.txt and PREFIX.json")
    choices = get_args(LoraDtype)
    parser.add_argument("--lora-dtype", choices=choices, default="auto", help="dtype of the adapters (default: auto)")
    parser.add_argument("--layers", type=int, metavar="N", help="decoder layers (default: the config's)")
    options = parser.parse_args(arguments)
    bench = json.loads(options.steps.read_text())
    found, context = whole_steps(bench, options.layers, options.lora_dtype)
    held = options.lora_dtype
    if held == "auto":
        held = DEFAULT_LORA_DTYPE.get(bench["options"]["precision"], "bf16")
    shown = whole_steps_text(found, bench, context, held)
    print(shown)
    if options.output is not None:
        options.output.with_suffix(".txt").write_text(shown)
        options.output.with_suffix(".json").write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
