"""Whether a device waits for constraints: `python -m sidestream.tools.dev.bench.structured_steps MODEL`.

MODEL is a directory with a tokenizer and a config.json (`tools/bench/model_directory.py` makes one); without it, it is
the demo model. An engine plans ahead of a simulated device, which takes `--step-ms` for a step, whatever this processor
does meanwhile. Printed is how far apart steps end, without constraints and with one that all answers share, by the
number of threads that fill masks; and what the engine's own thread works on a step.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from ....ops.core.kv_layout import pages_for
from ....runtime.api.request import Request
from ....runtime.api.sampling_params import SamplingParams
from ....runtime.api.structured_outputs import StructuredOutputsParams
from ....runtime.demo_model import DEMO_MODEL
from ....runtime.engine.engine import Engine
from ....runtime.scheduler.limits import SchedulerLimits
from ....runtime.scheduler.scheduler import Scheduler
from ....runtime.text.generation_config import eos_token_ids
from ....runtime.text.structured.grammar_compiler import GrammarCompiler
from ....runtime.text.structured.mask_filling import fill_threads, use_threads
from ....runtime.text.tokenizer import load_tokenizer
from ...bench.latency import ENDLESS
from ...bench.serving.simulated_gpu import HashRunner, TimedRunner
from ...options.engine import positive

PROMPT, OUTPUT = 128, 256
WARM_UP = 32
"""Steps that are not counted."""


def periods(make_request: Callable[[int], Request], answers: int, step_ms: float) -> tuple[list[float], float]:
    """(milliseconds between the ends of steps, milliseconds of the engine's thread a step)."""
    limits = SchedulerLimits(
        num_pages=answers * pages_for(PROMPT + OUTPUT),
        max_model_len=PROMPT + OUTPUT,
        max_num_seqs=answers,
        max_num_batched_tokens=8192,
        num_slots=0,
        prefix_caching=False,
    )
    runner = TimedRunner(HashRunner(), step_ms / 1000, 0.0)
    engine = Engine(Scheduler(limits, asynchronous_loads=True), runner, None, overlap=True)
    for number in range(answers):
        engine.add(make_request(number))
    ends, begin = [], time.thread_time()
    while engine.has_work:
        engine.step()
        ends.append(1e3 * time.perf_counter())
    worked = 1e3 * (time.thread_time() - begin)
    engine.close()
    gaps = [after - before for before, after in pairwise(ends)]
    return gaps[WARM_UP:-2], worked / len(ends)


def line(name: str, found: list[tuple[list[float], float]]) -> str:
    """What the middle one of several runs shows."""
    gaps, worked = sorted(found, key=lambda run: statistics.mean(run[0]))[len(found) // 2]
    slow = sorted(gaps)[len(gaps) * 95 // 100]
    return f"{name:<26}{statistics.mean(gaps):>10.3f}{statistics.median(gaps):>10.3f}{slow:>10.3f}{worked:>14.3f}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m sidestream.tools.dev.bench.structured_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", type=Path, default=Path(DEMO_MODEL))
    parser.add_argument("--answers", type=positive, default=64, metavar="N")
    parser.add_argument("--step-ms", type=float, default=3.1, metavar="MS")
    parser.add_argument("--threads", type=positive, nargs="+", default=[fill_threads()], metavar="N")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    options = parser.parse_args()
    vocabulary = int(json.loads((options.model / "config.json").read_text())["vocab_size"])
    tokenizer, ends = load_tokenizer(options.model), eos_token_ids(options.model)
    source = random.Random(0)
    prompts = [[source.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(options.answers)]

    def measure(name: str, **more: Any) -> None:
        def make(number: int) -> Request:
            params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
            grammar = compiler.compile(fits) if more else None
            return Request(str(number), None, prompts[number], params, grammar=grammar)

        print(line(name, [periods(make, options.answers, options.step_ms) for _ in range(options.repeats)]), flush=True)

    fits = StructuredOutputsParams(json=json.dumps(ENDLESS))
    compiler = GrammarCompiler(tokenizer, vocabulary, ends)
    print(f"{options.answers} answers over {vocabulary} tokens, a device whose steps take {options.step_ms:g} ms")
    print(f"{'ms between steps':<26}{'mean':>10}{'median':>10}{'p95':>10}{'own thread':>14}")
    measure("without constraints")
    for threads in options.threads:
        use_threads(threads)
        compiler = GrammarCompiler(tokenizer, vocabulary, ends)
        measure(f"with, masks by {threads} thread{'s' * (threads > 1)}", constrained=True)
        compiler.close()
    use_threads(None)


if __name__ == "__main__":
    main()
