"""Count answers of `exact=True` that depend on how they were computed; and of an engine without it, as a control.

    python -m sidestream.tools.dev.bench.exact_answers --adapters 8
    python -m sidestream.tools.dev.bench.exact_answers --prompts 32 --output-len 64

All prompts are answered once by steps of the largest size. Then each variant answers up to 16 batches of them again. It
has a number of requests at once and a maximum of tokens per step, reads the prefix cache or not, and may preempt random
sequences. An answer differs if one of its tokens or one bit of its log-probabilities differs. 256 prompts make 1,968
answers. Exits with 1 if an exact answer differs, or if no answer of the control does.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ....runtime.api.sampling_params import SamplingParams
from ...bench.random_model import write_model
from ...bench.serving.traffic import random_ids
from ...options.engine import positive
from ...options.models import shape_fields

Answer = tuple[tuple[int, ...], tuple[float, ...]]
PROMPT_TOKENS = (16, 700)
SHARED_TOKENS = (0, 64, 100, 600)
BATCHES = 16  # per variant
MAX_SEQS = 256
EVERY = 6  # steps between two preemptions, on average


class Variant(NamedTuple):
    """How answers are computed."""

    at_once: int
    step_tokens: int
    cached: bool
    preempted: bool


VARIANTS = [
    Variant(at_once, step_tokens, cached, preempted)
    for at_once in (1, 8, 64, 256)
    for step_tokens, cached, preempted in ((64, False, True), (512, True, False), (4096, False, False))
]


@contextmanager
def computed_as(llm: Any, variant: Variant) -> Generator[None]:
    """Limit the steps of an engine to a variant's, and preempt sequences, if it says so."""
    scheduler, step, source = llm.engine.scheduler, llm.engine.step, random.Random(1)
    limits, tokens = scheduler.states.limits, max(variant.step_tokens, variant.at_once)

    def step_and_preempt() -> Any:
        running = scheduler.states.running
        if running and source.randrange(EVERY) == 0 and (chosen := source.choice(running)).preemptions < 2:
            scheduler.preemption.preempt(chosen)
        return step()

    most = min(tokens, limits.max_num_seqs)
    scheduler.states.limits = replace(limits, max_num_batched_tokens=tokens, max_num_seqs=most)
    llm.engine.step = step_and_preempt if variant.preempted else step
    try:
        yield
    finally:
        scheduler.states.limits, llm.engine.step = limits, step


def answers(
    llm: Any, prompts: Sequence[list[int]], names: Sequence[str], output_len: int, variant: Variant
) -> list[Answer]:
    """Return the answers that a variant computes."""
    found: list[Answer] = []
    fields: dict[str, Any] = {"max_tokens": output_len, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    fields["skip_reading_prefix_cache"] = not variant.cached
    with computed_as(llm, variant):
        count = min(len(prompts), BATCHES * variant.at_once)
        for batch in (range(first, min(first + variant.at_once, count)) for first in range(0, count, variant.at_once)):
            params = [
                SamplingParams(temperature=index % 3 / 2, top_p=1 - index % 2 / 10, seed=index, **fields)
                for index in batch
            ]
            chosen = [names[index % len(names)] for index in batch]
            for output in llm.generate([prompts[index] for index in batch], params, chosen, use_tqdm=False):
                ids, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
                logprobs = tuple(entry[token].logprob for token, entry in zip(ids, entries, strict=True))
                found.append((tuple(ids), logprobs))
    return found


def count_differences(llm: Any, names: Sequence[str], options: argparse.Namespace) -> int:
    """Print a line per variant; return the number of answers that differ."""
    source, vocabulary = random.Random(0), llm.config.vocab_size
    beginning = random_ids(source, max(SHARED_TOKENS), vocabulary)
    prompts = [
        beginning[: source.choice(SHARED_TOKENS)] + random_ids(source, source.randint(*PROMPT_TOKENS), vocabulary)
        for _ in range(options.prompts)
    ]
    expected = answers(llm, prompts, names, options.output_len, Variant(MAX_SEQS, 4096, False, False))
    states, total, differing = llm.engine.scheduler.states, 0, 0
    for variant in VARIANTS:
        before = states.preemptions
        found = answers(llm, prompts, names, options.output_len, variant)
        other = sum(one != want for one, want in zip(found, expected, strict=False))
        preempted = states.preemptions - before
        print(f"  {variant}: {other} of {len(found)} answers differ, {preempted} preemptions", flush=True)
        total, differing = total + len(found), differing + other
    print(f"  {differing} of {total} answers of {options.output_len} tokens differ", flush=True)
    return differing


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="name of a model's shape, or its config.json")
    parser.add_argument("--adapters", type=positive, default=8, metavar="N", help="of rank 32")
    parser.add_argument("--prompts", type=positive, default=256, metavar="N")
    parser.add_argument("--output-len", type=positive, default=256, metavar="N", help="tokens of an answer")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    from ....runtime.llm import LLM

    counts = {}
    with tempfile.TemporaryDirectory(prefix="sidestream-exact-") as directory:
        adapters = write_model(Path(directory), shape_fields(options.shape), options.adapters, rank=32)
        sizes: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": MAX_SEQS, "max_num_batched_tokens": 4096}
        sizes |= {"load_format": "dummy", "device": options.device, "speculation": "off", "show_progress": False}
        for exact in (True, False):
            print(f"exact={exact}", flush=True)
            with LLM(directory, adapters, exact=exact, **sizes) as llm:
                counts[exact] = count_differences(llm, list(adapters), options)
    return int(counts[True] > 0 or counts[False] == 0)


if __name__ == "__main__":
    sys.exit(main())
