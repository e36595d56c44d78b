"""Time the first token of a long prompt that is computed, in host memory and on the device, and the decoding of others.

    python -m sidestream.tools.dev.bench.host_kv --shape llama-3.1-8b --prompt-len 8192

More such prompts than the KV cache holds are computed in turn, so that each has left the device when it is sent again.
The second part decodes `--others` requests while prompts from host memory arrive one after the other. Each load
displaces pages, which are saved. Only steps with one token of each sequence are compared: with copies in flight and
without.
"""

import argparse
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
from ...options.engine import positive
from ...options.environment import write_figures
from ...options.models import shape_fields

FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
TAIL = 32
"""Tokens of each prompt after its last full page."""
OTHER_TOKENS = 64
"""Tokens of the prompts of other requests."""
PAUSE, STEPS = 4, 10
"""Steps between two long prompts, and those from one to the next for which others have KV pages."""


class StepTimer:
    """A runner that measures decode steps: `times[False]` has milliseconds after the step before, `times[True]` those
    of steps that were submitted while copies of pages were in flight.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.times: dict[bool, list[float]] = {False: [], True: []}
        self._submitted: deque[tuple[bool, bool]] = deque()
        self._in_flight: set[int] = set()
        self._last = time.perf_counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def submit(self, plan: Any) -> Any:
        """Submit a step."""
        self._submitted.append((plan.decode, bool(self._in_flight)))
        return self.runner.submit(plan)

    def collect(self, handle: Any) -> Any:
        """Wait for a step."""
        result, now = self.runner.collect(handle), time.perf_counter()
        decode, copying = self._submitted.popleft()
        if decode:
            self.times[copying].append(1e3 * (now - self._last))
        self._last = now
        return result

    def copy_pages(self, copies: Any) -> None:
        """Start copies."""
        self._in_flight.add(copies.ticket)
        self.runner.copy_pages(copies)

    def copied(self, timeout: float = 0.0) -> Any:
        """Return ended copies."""
        ended = self.runner.copied(timeout)
        self._in_flight.difference_update(ticket for ticket, _ in ended)
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
    decoding = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
    engine.runner, before = timer, engine.scheduler.stats()
    for index, prompt in enumerate(random_prompts(llm, others, OTHER_TOKENS, 7)):
        engine.add(Request(f"other-{index}", None, prompt, decoding))
    for index in range(arrivals):
        for _ in range(PAUSE):
            engine.step()
        engine.add(Request(f"long-{index}", None, prompts[index % count], FIRST_TOKEN))
        while f"long-{index}" not in [output.request_id for output in engine.step()[1]]:
            pass
    for index in range(others):
        engine.abort(f"other-{index}")
    while engine.has_work:
        engine.step()
    engine.runner, after = timer.runner, engine.scheduler.stats()
    found: dict[str, float] = {"arrivals": arrivals, "pages_loaded": after.host_pages_loaded - before.host_pages_loaded}
    for copying, name in ((False, "without"), (True, "with")):
        times = timer.times[copying]
        found |= {f"ms_{name}": statistics.median(times) if times else float("nan"), f"steps_{name}": len(times)}
    return found


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
    sizes |= {"device": options.device, "load_format": "dummy", "show_progress": False}
    with LLM(shape_fields(options.shape), kv_host_gb=options.kv_host_gb, **sizes) as llm:
        first = first_tokens(llm, length, count, options.rounds)
        for place, found in first.items():
            print(f"{length} tokens, {place}: {found['ms']:.2f} ms, {found['cached']} cached", flush=True)
        decode = decode_times(llm, length, count, options.others, options.arrivals)
        print(", ".join(f"{name} {value:.3f}" for name, value in decode.items()), flush=True)
    if options.json is not None:
        write_figures(options.json, {"prompt": length, "first_token": first, "decode": decode})


if __name__ == "__main__":
    main()
