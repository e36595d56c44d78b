"""`sidestream bench latency`: milliseconds per decode step next to the floor (workload A).

C requests of random token ids start at once, end-of-sequence is ignored, sampling is greedy. A step's time is (time for
`output_len` outputs - time for 32 outputs) / (output_len - 32), so that the prefill cancels out.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.api.checks import MAX_DRAFTS
from ...runtime.demo_model import DEMO_MODEL
from ..options.engine import (
    add_command,
    add_compile_options,
    add_ranks,
    add_run_options,
    add_value,
    check_output,
    given,
    number,
    positive,
    precision_arguments,
)
from ..options.environment import write_figures
from ..options.models import (
    LLAMA_8B,
    add_bench_model,
    add_random_adapters,
    check_one_model,
    pick_adapters,
    shape_fields,
)
from .engine_run import SHORT_OUTPUT, measure
from .floors import (
    adapter_bytes,
    decode_floor_ms,
    floor_note,
    gpu_under,
    kv_bytes_per_token,
    kv_element_bytes,
    weight_bytes,
)
from .profile_run import write_profile
from .random_model import write_model, write_random_adapters

if TYPE_CHECKING:
    from ...compiler.cost.hardware import Gpu

ENDLESS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "state": {"enum": ["open", "closed", "unknown"]},
        },
        "required": ["name", "count", "state"],
        "additionalProperties": False,
    },
    "minItems": 4096,
}
"""A schema that no answer completes during the measurement."""

DESCRIPTION = """\
Measure milliseconds per decode step and output tokens per second, next to the floor that the GPU's memory bandwidth
sets.

By default the model has the shape of Llama-3.1-8B with random weights, and 8 random adapters of rank 32 on all linear
layers; nothing is downloaded.
  --lora none   no request uses an adapter
  --lora zipf   each request picks one of the adapters with p(k) ~ 1/k
  --lora four   four adapters in turn"""

EXAMPLES = """\
examples:
  sidestream bench latency                                              C = 1, 8, 64 without adapters and with a Zipf
                                                                        mix
  sidestream bench latency --concurrency 64 --lora none zipf four
  sidestream bench latency --speculate 3 --structured --concurrency 64      drafts and constraints together
  sidestream bench latency --shape qwen3-8b --concurrency 1 64           another family's shape with random weights
  sidestream bench latency --shape qwen3-30b-a3b --lora none             a mixture of experts
  sidestream bench latency --shape llama-3.1-70b --tensor-parallel-size 2        one model over two GPUs
  sidestream bench latency --concurrency 64 --lora zipf --disable-pass pack_projections
  sidestream bench latency --speculate 7 --concurrency 1 --acceptance 0 0.5 0.8
  sidestream bench latency --speculate auto --concurrency 1 64           as many drafts as the engine chooses
  sidestream bench latency --exact --concurrency 1 8 64 256              the same bits in every batch, and their cost
  sidestream bench latency --ablate --concurrency 8 64                   one optimisation off at a time
  sidestream bench latency demo --output-len 40 --concurrency 2          the demo model, to see the format"""


def drafts(text: str) -> int | str:
    """Parse a number of drafts, or `auto`."""
    if text == "auto":
        return text
    value = int(text)
    if not 1 <= value <= MAX_DRAFTS:
        raise argparse.ArgumentTypeError(f"{text} must be auto, or from 1 to {MAX_DRAFTS}")
    return value


probability = number("probability", 0, 1)


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds, throughput in output tokens per second.

    drafts                            per request and step; "auto": the engine chooses
    tokens_per_step, drafts_per_step  per request, with drafts accepted at an injected rate
    """

    concurrency: int
    lora: str
    active_adapters: int
    ms_per_step: float
    spread_percent: float
    tokens_per_second: float
    floor_ms: float
    share_of_floor: float
    structured: bool = False
    drafts: int | str = 0
    injected_acceptance: float | None = None
    tokens_per_step: float = 1.0
    drafts_per_step: float = 0.0


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the bench to the `sidestream bench` parser."""
    usage = "%(prog)s [MODEL | --shape NAME] [--concurrency C ...] [--lora none|zipf|four ...] [options]"
    parser = add_command(
        commands, "latency", "time decode steps next to the memory-bandwidth floor", DESCRIPTION, EXAMPLES, run, usage
    )
    add_bench_model(parser)
    add_value(parser, "--concurrency", [1, 8, 64], "requests at once, measured in turn", metavar="C", nargs="+")
    add_random_adapters(parser)
    parser.add_argument(
        "--num-dora", type=int, default=0, metavar="N", help="random adapters that are DoRA, from the first on"
    )
    add_value(parser, "--input-len", 128, "prompt tokens")
    parser.add_argument("--output-len", type=positive, default=256, metavar="N", help="output tokens (default: 256)")
    add_value(parser, "--num-iters", 3, "measurements of each line; the median counts")
    add_value(parser, "--output-json", Path("bench-latency.json"), "file of the figures", Path, "FILE")
    parser.add_argument(
        "--ablate", action="store_true", help="time a layer with one optimisation off at a time instead (GPU)"
    )
    parser.add_argument(
        "--structured",
        action="store_true",
        help="measure each line again with answers that must fit a JSON schema (+json)",
    )
    parser.add_argument(
        "--speculate",
        type=drafts,
        metavar="K",
        help="measure each line again with K drafts per request and step (auto: the engine chooses), accepted at an "
        "injected rate (@P), not at the rate of a model",
    )
    add_value(parser, "--acceptance", [0.0, 0.75], "injected acceptance rates", probability, "P", nargs="+")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="write a trace of some steps of the last line for Perfetto"
    )
    add_compile_options(parser)
    engine = parser.add_argument_group("engine")
    add_ranks(engine)
    add_run_options(engine, seed="seed of prompts, weights and the adapters' mix")


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot be measured, before anything is built."""
    if options.output_len <= SHORT_OUTPUT:
        raise ValueError(
            f"--output-len {options.output_len} must be above {SHORT_OUTPUT}: a step's time is the difference to a "
            f"run of {SHORT_OUTPUT} outputs"
        )
    if ranks_of(options) > 1 and (options.speculate or options.ablate):
        raise ValueError(
            f"{'--speculate' if options.speculate else '--ablate'} is measured in one process; leave out "
            "--tensor-parallel-size"
        )
    if not 0 <= options.num_dora <= options.num_adapters:
        raise ValueError(f"--num-dora {options.num_dora} must be from 0 to --num-adapters {options.num_adapters}")
    check_output("--output-json", options.output_json)
    check_output("--profile", options.profile)


def ranks_of(options: argparse.Namespace) -> int:
    """Return the number of GPUs of the model."""
    return getattr(options, "tensor_parallel_size", None) or 1


def model_fields(options: argparse.Namespace) -> tuple[dict[str, Any], Path | None]:
    """Return the fields of config.json and the checkpoint's directory (None: random weights)."""
    check_one_model(options)
    if options.model is None:
        return shape_fields(options.shape) if options.shape else LLAMA_8B, None
    directory = DEMO_MODEL if options.model == "demo" else Path(options.model)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} is not a model directory: it has no config.json; give a directory, `demo`, or no MODEL for "
            "Llama-3.1-8B's shape"
        )
    return json.loads((directory / "config.json").read_text()), directory


def run(options: argparse.Namespace) -> int:
    """Build the engine once, measure every (lora, concurrency) pair, print the table and write the JSON."""
    check(options)
    if options.ablate:
        from .ablation import run as ablate

        return ablate(
            options.concurrency, options.lora_rank, options.num_adapters, options.num_iters, options.output_json
        )
    config, directory = model_fields(options)
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as scratch:
        adapters = make_adapters(options, config, Path(scratch), options.num_dora)
        started = time.perf_counter()
        if options.structured and directory is None:
            write_model(Path(scratch) / "model", config, 0, options.lora_rank)  # constraints need a tokenizer
            llm = build(options, str(Path(scratch) / "model"), directory, adapters, options.speculate)
        else:
            llm = build(options, config, directory, adapters, options.speculate)
        start_up = time.perf_counter() - started
        print(f"ready after {start_up:.1f} s\n")
        print(header() + "  tokens/step  drafts/step  times" * bool(options.speculate))
        rows: list[Row] = []
        for kind in options.lora:
            for concurrency in options.concurrency:
                variants: list[tuple[bool, float | None]] = [(False, None)]
                variants += [(True, None)] * options.structured
                for asked in (False, True) if options.structured else (False,):
                    variants += [(asked, acceptance) for acceptance in options.acceptance if options.speculate]
                for structured, acceptance in variants:
                    row = measure_row(llm, options, config, kind, list(adapters), concurrency, structured, acceptance)
                    rows.append(row)
                    made = f"{row.tokens_per_step:>13.2f}{row.drafts_per_step:>13.2f}" if options.speculate else ""
                    if acceptance is not None:
                        made += f"{times_decoding(row, rows):>7.2f}"
                    print(line(row, llm.device.type == "cuda") + made, flush=True)
        if options.profile is not None:
            again, _ = load(llm, options, config, options.lora[-1], list(adapters), options.concurrency[-1])
            steps = write_profile(llm, again, options.profile)
            print(f"\nwrote {options.profile}: {steps} steps, for https://ui.perfetto.dev")
        on_gpu, gpu = llm.device.type == "cuda", gpu_under(llm)
        llm.close()
    print(f"\nC: requests at once; spread: (slowest - fastest) / median of {options.num_iters} runs;")
    if options.speculate:
        count = "as many drafts as the engine chooses" if options.speculate == "auto" else f"{options.speculate} drafts"
        print(f"@P: {count} a request and step, each right with the injected probability P")
        print("times: speed relative to the line without drafts, without prompts")
    print(floor_note(gpu, on_gpu, ranks_of(options)))
    write(options, config, rows, start_up, gpu)
    return 0


def make_adapters(
    options: argparse.Namespace, config: dict[str, Any], directory: Path, num_dora: int = 0
) -> dict[str, str]:
    """Write random adapters below `directory` and return name -> path; none if no line uses adapters.

    The first `num_dora` are DoRA.
    """
    count = options.num_adapters if set(options.lora) - {"none"} else 0
    return write_random_adapters(directory, config, options.lora_rank, count, options.seed, num_dora)


def build(
    options: argparse.Namespace,
    config: dict[str, Any] | str,
    directory: Path | None,
    adapters: dict[str, str],
    speculation: int | str | None = None,
) -> Any:
    """Return the engine; without a checkpoint's directory its weights are random."""
    from ...runtime.llm import LLM

    arguments = precision_arguments(options) | given(options, "gpu_memory_utilization", "device")
    if ranks_of(options) > 1:
        arguments["tensor_parallel_size"] = ranks_of(options)
    if speculation is not None:
        arguments["speculation"] = speculation
    arguments |= {
        "max_model_len": options.input_len + options.output_len,
        "max_num_seqs": max(options.concurrency),
        "adapters": adapters,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": False,  # the same prompts repeat
        "seed": options.seed,
    }
    if adapters:
        arguments |= {"max_loras": len(adapters), "max_lora_rank": options.lora_rank}
    llm = LLM(config, load_format="dummy", **arguments) if directory is None else LLM(str(directory), **arguments)
    llm.prefetch_adapters()  # else the first lines would include reading them in the background
    return llm


def load(
    llm: Any,
    options: argparse.Namespace,
    config: dict[str, Any],
    kind: str,
    names: Sequence[str],
    concurrency: int,
    structured: bool = False,
    acceptance: float | None = None,
) -> tuple[Callable[[int], None], int]:
    """Return a function that generates a given number of outputs per request, and the number of active adapters.

    acceptance  probability that a draft is right; None: without drafts
    """
    from ...runtime.api.sampling_params import SamplingParams

    source = random.Random(options.seed)
    prompts = [[source.randrange(config["vocab_size"]) for _ in range(options.input_len)] for _ in range(concurrency)]
    chosen = pick_adapters(kind, names, concurrency, options.seed)

    def generate(length: int, speculation: str | None = "off" if acceptance is None else None) -> Any:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            structured_outputs={"json": ENDLESS} if structured else None,
            speculation=speculation,
        )
        outputs = llm.generate(prompts, params, adapter=chosen, use_tqdm=False)
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != length * concurrency:
            raise RuntimeError(f"the engine returned {made} tokens instead of {length * concurrency}")
        return outputs

    if options.speculate:
        from .injected_drafts import inject, stop_injecting

        stop_injecting(llm)  # of the line before
    if acceptance is not None:
        inject(llm, prompts, generate(options.output_len, "off"), acceptance, config["vocab_size"])
    return generate, len(set(chosen) - {None})


def measure_row(
    llm: Any,
    options: argparse.Namespace,
    config: dict[str, Any],
    kind: str,
    names: Sequence[str],
    concurrency: int,
    structured: bool = False,
    acceptance: float | None = None,
) -> Row:
    """Measure one line of the table."""
    generate, active = load(llm, options, config, kind, names, concurrency, structured, acceptance)
    step, spread, whole = measure(generate, options.output_len, options.num_iters)
    tokens, chosen = (1.0, 0.0) if acceptance is None else per_step(llm, generate, options.output_len)
    step *= tokens
    middle_context = options.input_len + (SHORT_OUTPUT + options.output_len) / 2
    floor = decode_floor_ms(
        weight_bytes(config, options.precision, tokens=concurrency),
        kv_bytes_per_token(config, kv_element_bytes(options.precision, options.kv_cache_dtype)),
        concurrency * middle_context,
        active
        * adapter_bytes(
            config,
            options.lora_rank,
            element_bytes=4 if options.precision == "fp32" else 2,
            tokens=concurrency // max(1, active),
        ),
        gpu_under(llm).bytes_per_second(),
        ranks_of(options),
    )
    rate = concurrency * options.output_len / whole
    drafts = options.speculate if acceptance is not None else 0
    return Row(
        concurrency,
        kind,
        active,
        step,
        spread,
        rate,
        floor,
        floor / step,
        structured,
        drafts,
        acceptance,
        tokens,
        chosen,
    )


def times_decoding(row: Row, rows: Sequence[Row]) -> float:
    """Return the speed of a row relative to the row without drafts."""
    like = (row.lora, row.concurrency, row.structured)
    (without,) = (each for each in rows if each.drafts == 0 and (each.lora, each.concurrency, each.structured) == like)
    return row.tokens_per_step / row.ms_per_step * without.ms_per_step


def per_step(llm: Any, generate: Callable[[int], Any], output_len: int) -> tuple[float, float]:
    """Return (output tokens, drafts) per request and step, over the difference of the two runs."""
    steps, drafted = [], []
    for length in (SHORT_OUTPUT, output_len):
        before = llm.engine.scheduler.states.step
        outputs = generate(length)
        steps.append(llm.engine.scheduler.states.step - before)
        drafted.append(sum(output.num_draft_tokens for output in outputs) / len(outputs))
    taken = max(1, steps[1] - steps[0])
    return (output_len - SHORT_OUTPUT) / taken, max(0.0, drafted[1] - drafted[0]) / taken


def header() -> str:
    """Return the head of the table."""
    return (
        f"{'lora':<14}{'C':>5}{'adapters':>10}{'ms/step':>10}{'spread':>9}{'tok/s':>11}{'floor ms':>10}{'of floor':>10}"
    )


def line(row: Row, on_gpu: bool = True) -> str:
    """Return a row of the table, without the floor on a CPU."""
    name = row.lora + "+json" * row.structured
    if row.injected_acceptance is not None:
        name += f"@{row.injected_acceptance:g}"
    counts = f"{name:<14}{row.concurrency:>5}{row.active_adapters:>10}"
    times = f"{row.ms_per_step:>10.3f}{row.spread_percent:>8.1f}%{row.tokens_per_second:>11.0f}"
    floor = f"{row.floor_ms:>10.3f}{row.share_of_floor:>10.0%}" if on_gpu else f"{'-':>10}{'-':>10}"
    return counts + times + floor


def write(
    options: argparse.Namespace, config: dict[str, Any], rows: Sequence[Row], start_up: float, gpu: "Gpu"
) -> None:
    """Write the figures, with all that is needed to interpret them."""
    asked = {
        name: value for name, value in vars(options).items() if name not in ("run", "output_json", "profile", "model")
    }
    content = {
        "workload": "A",
        "model": {None: f"{options.shape or 'llama-3.1-8b'} shape, random weights", "demo": "demo"}.get(
            options.model, Path(options.model or "").name
        ),
        "config": config,
        "options": asked,
        "start_up_seconds": round(start_up, 2),
        "rows": [asdict(row) for row in rows],
        "floor_of": gpu.to_json(),
    }
    write_figures(options.output_json, content)
