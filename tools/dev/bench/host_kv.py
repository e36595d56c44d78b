"""Time the first token of a long prompt that is computed, in host memory and on the device, and the decoding of others.

    python -m sidestream.tools.dev.bench.host_kv --shape llama-3.1-8b --prompt-len 8192

More such prompts than the KV cache holds are computed in turn, so that each has left the device when it is sent again.
The second part decodes `--others` requests while prompts from host memory arrive one after the other. Each load
displaces pages, which are saved. Only steps with one token of each sequence are compared: with copies in flight and
without.
"""

import argparse
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....ops.core.kv_layout import PAGE_SIZE, pages_for
from ....runtime.api.request import Request
from ....runtime.api.sampling_params import SamplingParams
from ....runtime.scheduler.step_plan import PageCopies, StepPlan, StepResult
from ...options.engine import positive
from ...options.environment import collect
from ...options.models import shape_fields

FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
TAIL = 32
"""Tokens of each prompt after its last full page."""
OTHER_TOKENS = 64
"""Tokens of the prompts of other requests."""
PAUSE = 4
"""Steps between two long prompts."""
STEPS = 10
"""Steps from a long prompt to the next, at most; KV pages are reserved for them."""


class StepTimer:
    """A runner that notes for each step: its milliseconds after the step before, whether it is a decode step, and
    whether copies of pages were in flight.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._planned: deque[tuple[bool, bool]] = deque()
        self._num_copies = 0
        self._last = 0.0
        self.steps: list[tuple[float, bool, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, plan: StepPlan) -> Any:
        """Submit a step."""
        self._planned.append((plan.decode, self._num_copies > 0))
        return self._runner.submit(plan)

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step."""
        result: StepResult = self._runner.collect(handle)
        now = time.perf_counter()
        self.steps.append((1e3 * (now - self._last), *self._planned.popleft()))
        self._last = now
        return result

    def copy_pages(self, copies: PageCopies) -> None:
        """Start copies."""
        self._num_copies += 1
        self._runner.copy_pages(copies)

    def copied(self, timeout: float = 0.0) -> list[tuple[int, str | None]]:
        """Return ended copies."""
        ended: list[tuple[int, str | None]] = self._runner.copied(timeout)
        self._num_copies -= len(ended)
        return ended


def random_prompts(llm: Any, count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of `length` random tokens."""
    source = random.Random(seed)
    return [[source.randrange(llm.config.vocab_size) for _ in range(length)] for _ in range(count)]


def first_tokens(llm: Any, length: int, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return place -> median milliseconds to the first token, and cached tokens, for prompts of `length` tokens.

    `count`: different prompts, more than the device holds.
    """
    times: dict[str, list[float]] = {"computed": [], "device": [], "host": []}
    cached: dict[str, int] = {}

    def measure(place: str, prompt: list[int]) -> None:
        begin = time.perf_counter()
        (output,) = llm.generate([prompt], FIRST_TOKEN, use_tqdm=False)
        times[place].append(1e3 * (time.perf_counter() - begin))
        cached[place] = output.num_cached_tokens

    for index in range(rounds + 1):
        prompt, *others = random_prompts(llm, count, length, index)
        measure("computed", prompt)
        measure("device", prompt)
        for other in others:
            llm.generate([other], FIRST_TOKEN, use_tqdm=False)
        measure("host", prompt)
    return {place: {"ms": statistics.median(found[1:]), "cached": cached[place]} for place, found in times.items()}


def decode_times(llm: Any, length: int, count: int, others: int, arrivals: int) -> dict[str, float]:
    """Return median milliseconds of a decode step of `others` requests, with copies in flight and without."""
    engine, timer = llm.engine, StepTimer(llm.engine.runner)
    prompts = random_prompts(llm, count, length, 99)
    for prompt in prompts:
        llm.generate([prompt], FIRST_TOKEN, use_tqdm=False)
    tokens = llm.max_model_len - OTHER_TOKENS
    decoding = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.runner = timer
    before = engine.scheduler.stats()
    try:
        for index, prompt in enumerate(random_prompts(llm, others, OTHER_TOKENS, 7)):
            engine.add(Request(f"other-{index}", None, prompt, decoding))
        for index in range(arrivals):
            for _ in range(PAUSE):
                engine.step()
            engine.add(Request(f"long-{index}", None, prompts[index % count], FIRST_TOKEN))
            finished: list[str] = []
            while f"long-{index}" not in finished:
                finished = [output.request_id for output in engine.step()[1]]
    finally:
        for index in range(others):
            engine.abort(f"other-{index}")
        while engine.has_work:
            engine.step()
        engine.runner = timer._runner
    after = engine.scheduler.stats()
    kinds = {
        copying: [ms for ms, decode, copies in timer.steps[2:] if decode and copies == copying]
        for copying in (False, True)
    }
    return {
        "ms_without": statistics.median(kinds[False]),
        "ms_with": statistics.median(kinds[True]) if kinds[True] else float("nan"),
        "steps_without": len(kinds[False]),
        "steps_with": len(kinds[True]),
        "arrivals": arrivals,
        "pages_loaded": after.host_pages_loaded - before.host_pages_loaded,
        "pages_saved": after.host_pages_saved - before.host_pages_saved,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and with --json write it with the environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="name of a model's shape, or its config.json")
    parser.add_argument("--prompt-len", type=positive, default=8192, metavar="N")
    parser.add_argument("--others", type=positive, default=32, metavar="N", help="requests that decode meanwhile")
    parser.add_argument("--arrivals", type=positive, default=50, metavar="N", help="long prompts that arrive meanwhile")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N")
    parser.add_argument("--kv-host-gb", type=float, default=16.0, metavar="N")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    from ....runtime.llm import LLM

    length = options.prompt_len // PAGE_SIZE * PAGE_SIZE + TAIL
    max_model_len = length + PAGE_SIZE
    growth = min(max_model_len, OTHER_TOKENS + STEPS * options.arrivals)
    pages = 2 * pages_for(max_model_len) + options.others * pages_for(growth)
    count = pages // pages_for(length) + 2
    sizes = {"max_model_len": max_model_len, "max_num_seqs": options.others + 4, "num_kv_pages": pages}
    kind = {"device": options.device, "load_format": "dummy", "show_progress": False}
    with LLM(shape_fields(options.shape), kv_host_gb=options.kv_host_gb, **sizes, **kind) as llm:
        first = first_tokens(llm, length, count, options.rounds)
        for place, found in first.items():
            print(f"{length} tokens, {place}: {found['ms']:.2f} ms, {found['cached']} cached", flush=True)
        decode = decode_times(llm, length, count, options.others, options.arrivals)
        print(", ".join(f"{name} {value:.3f}" for name, value in decode.items()), flush=True)
    if options.json is not None:
        rows = {"prompt": length, "first_token": first, "decode": decode}
        options.json.write_text(json.dumps({"environment": collect(), **rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
