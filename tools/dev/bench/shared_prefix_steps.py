"""Time decode steps of requests with the same prefix, with cascade attention and without, and of such without a prefix.

    python -m sidestream.tools.dev.bench.shared_prefix_steps                      # 256 requests, Llama-3.1-8B's shape
    python -m sidestream.tools.dev.bench.shared_prefix_steps --requests 128 --shared 2048

Each request has `--own` tokens of its own after the prefix, and samples `--tokens`. The table has the median of all
steps with one token of each request, its difference to steps without a prefix, and the steps with cascade attention.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from ....runtime.api.sampling_params import SamplingParams
from ...options.engine import positive
from ...options.models import shape_fields
from .host_kv import StepTimer, random_prompts


def decode_ms(llm: Any, requests: int, shared: int, own: int, tokens: int) -> tuple[float, int]:
    """Return the median milliseconds of a decode step, and the number of steps with cascade attention."""
    engine, timer = llm.engine, StepTimer(llm.engine.runner)
    (prefix,) = random_prompts(llm, 1, shared, 1) if shared else ([],)
    prompts = [prefix + prompt for prompt in random_prompts(llm, requests, own, 2 + shared)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    before = engine.scheduler.stats().cascade_steps
    engine.runner = timer
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        engine.runner = timer.runner
    return statistics.median(timer.times[False]), engine.scheduler.stats().cascade_steps - before


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="name of a model's shape, or its config.json")
    parser.add_argument("--requests", type=positive, default=256, metavar="N")
    parser.add_argument("--shared", type=positive, default=1024, metavar="N", help="tokens of the prefix")
    parser.add_argument("--own", type=positive, default=256, metavar="N", help="other tokens of each prompt")
    parser.add_argument("--tokens", type=positive, default=128, metavar="N", help="sampled tokens of each request")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    from ....runtime.llm import LLM

    lengths = options.own, options.tokens
    sizes = {"max_model_len": options.shared + sum(lengths) + 1, "max_num_seqs": options.requests}
    sizes |= {"device": options.device, "load_format": "dummy", "show_progress": False}
    print(f"{options.requests} requests of {options.own} tokens and a prefix\nprefix cascade  ms/step  more  steps")
    alone = 0.0
    for cascade in (False, True):
        with LLM(shape_fields(options.shape), cascade_attention=cascade, **sizes) as llm:
            for shared in (0, options.shared):
                ms, steps = decode_ms(llm, options.requests, shared, *lengths)
                alone = alone if shared else ms
                print(f"{shared:6d} {cascade!s:>7} {ms:8.3f} {ms / alone - 1:5.1%} {steps:6d}", flush=True)


if __name__ == "__main__":
    main()
