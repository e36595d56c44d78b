"""Time the first token of a long cached prompt with one adapter as aLoRA and as LoRA.

    python -m sidestream.tools.dev.bench.activated_lora --shape llama-3.1-8b --prompt-len 8192 32768

Both adapters have the same random weights; the aLoRA's invocation is `--tail` tokens before the end of the prompt. In
each round the base model computes the prompt, then each adapter answers it. The adapters are on the GPU before.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....runtime.api.sampling_params import SamplingParams
from ...bench.random_model import write_model
from ...options.engine import positive
from ...options.models import shape_fields

FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
INVOCATION = [1, 2, 3]


def write_adapters(directory: Path, fields: dict[str, Any], rank: int) -> dict[str, str]:
    """Write a model without weights and its adapter as `lora` and as `alora`. Return the adapters' directories."""
    lora = Path(next(iter(write_model(directory, fields, 1, rank).values())))
    alora = Path(shutil.copytree(lora, lora.with_name("alora")))
    config = json.loads((lora / "adapter_config.json").read_text()) | {"alora_invocation_tokens": INVOCATION}
    (alora / "adapter_config.json").write_text(json.dumps(config))
    return {"lora": str(lora), "alora": str(alora)}


def measure(llm: Any, length: int, tail: int, rounds: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return adapter -> median milliseconds to the first token, and cached tokens, for prompts of `length` tokens."""
    source = random.Random(seed)
    times: dict[str, list[float]] = {"lora": [], "alora": []}
    cached: dict[str, int] = {}
    for _ in range(rounds + 1):
        prompt = [source.randrange(len(INVOCATION) + 1, llm.config.vocab_size) for _ in range(length)]
        prompt[-tail : len(INVOCATION) - tail] = INVOCATION
        llm.generate([prompt], FIRST_TOKEN, use_tqdm=False)
        for name, found in times.items():
            begin = time.perf_counter()
            (output,) = llm.generate([prompt], FIRST_TOKEN, name, use_tqdm=False)
            found.append(1e3 * (time.perf_counter() - begin))
            cached[name] = output.num_cached_tokens
    # the first round loads the adapters
    return {name: {"ms": statistics.median(found[1:]), "cached": cached[name]} for name, found in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="name of a model's shape, or its config.json")
    parser.add_argument("--prompt-len", type=positive, nargs="+", default=[8192, 32768], metavar="N")
    parser.add_argument("--tail", type=positive, default=100, metavar="N", help="tokens from the invocation on")
    parser.add_argument("--rank", type=positive, default=32, metavar="R")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    if not len(INVOCATION) < options.tail < min(options.prompt_len):
        parser.error(f"--tail {options.tail} must be above {len(INVOCATION)} and below --prompt-len")
    from ....runtime.llm import LLM

    with tempfile.TemporaryDirectory(prefix="sidestream-alora-") as directory:
        adapters = write_adapters(Path(directory), shape_fields(options.shape), options.rank)
        sizes = {"max_model_len": max(options.prompt_len) + 64, "max_num_seqs": 8, "device": options.device}
        with LLM(directory, adapters, load_format="dummy", show_progress=False, **sizes) as llm:
            for length in options.prompt_len:
                found = measure(llm, length, options.tail, options.rounds)
                print(f"{length:7} tokens: " + ", ".join(f"{name} {found[name]}" for name in found), flush=True)


if __name__ == "__main__":
    main()
