"""Run one engine under workloads A and P: `python engine_run.py JOB.json`, for `versus_vllm`.

The engine is a module with vLLM's interface (`LLM`, `SamplingParams`, `LoRARequest`): vLLM or Sidestream. This file
imports no other file of Sidestream, so that the Python with vLLM can run it by its path. The job:

  engine      "vllm" or "sidestream"
  arguments   of `LLM`
  adapters    directories; adapter i is the i-th
  request     more arguments of `LoRARequest`
  vocabulary  prompts are random ids below it
  seed, repeats
  loads       [{"workload", "concurrency", "input_len", "output_len", "chosen": [index of an adapter or null, ...]}]

Each line of stdout that begins with RESULT has a JSON object: the engine's version and start, then each load.
"""

import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

SHORT_OUTPUT = 32
RESULT = "RESULT "


def measure(
    generate: Callable[[int], Any], output_len: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float, float]:
    """Return (median ms per step, spread in percent, median seconds of a whole run).

    `generate(n)` makes n outputs for every request. Raises ValueError if the longer run was not slower.
    """
    generate(min(8, SHORT_OUTPUT))
    generate(SHORT_OUTPUT)
    steps, wholes = [], []
    for _ in range(repeats):
        seconds = {}
        for length in (SHORT_OUTPUT, output_len):
            started = clock()
            generate(length)
            seconds[length] = clock() - started
        steps.append(1e3 * (seconds[output_len] - seconds[SHORT_OUTPUT]) / (output_len - SHORT_OUTPUT))
        wholes.append(seconds[output_len])
    middle = statistics.median(steps)
    if middle <= 0:
        raise ValueError(f"{output_len} outputs took no longer than {SHORT_OUTPUT}: raise --output-len or --num-iters")
    return middle, 100 * (max(steps) - min(steps)) / middle, statistics.median(wholes)


def draw_larger_weights() -> None:
    """Let vLLM draw dummy weights of the size of a trained model's, and other ones for each tensor.

    Its own are at most 0.001, and the same for all tensors of a size: of a mixture of experts few experts are read.
    """
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    seeds = itertools.count()

    def draw(tensor: Any, *_: Any) -> None:
        import torch

        if tensor.device.type == "meta" or not tensor.is_floating_point():
            return
        generator = torch.Generator(tensor.device).manual_seed(next(seeds))
        low, high = (0.9, 1.1) if tensor.dim() < 2 else (-0.035, 0.035)  # norms and scales; matrices
        drawn = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
        with torch.no_grad():
            tensor.copy_(drawn.uniform_(low, high, generator=generator).to(tensor.dtype))

    for module in (weight_utils, dummy_loader):  # the engine's process is a fork of this one
        module.initialize_single_dummy_weight = draw


class Engine:
    """The engine of a job; every adapter has answered once."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.module = import_module(job["engine"])
        lora = import_module("vllm.lora.request") if job["engine"] == "vllm" else self.module
        self.adapters = [
            lora.LoRARequest(f"adapter-{index}", index + 1, path, **job["request"])
            for index, path in enumerate(job["adapters"])
        ]
        if job["engine"] == "vllm" and job["arguments"].get("load_format") == "dummy":
            draw_larger_weights()
        started = time.perf_counter()
        self.llm = self.module.LLM(**job["arguments"])
        self.seconds = time.perf_counter() - started
        self.generate(max(len(self.adapters), 1), 16, 2, [*range(len(self.adapters))] or [None])

    def generate(self, concurrency: int, input_len: int, output_len: int, chosen: list[int | None]) -> None:
        """Answer `concurrency` prompts of random ids with `output_len` tokens each.

        Raises RuntimeError for another number of tokens.
        """
        source = random.Random(self.job["seed"])
        prompts = [
            {"prompt_token_ids": [source.randrange(self.job["vocabulary"]) for _ in range(input_len)]}
            for _ in range(concurrency)
        ]
        params = self.module.SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        more = {"lora_request": [None if each is None else self.adapters[each] for each in chosen]}
        outputs = self.llm.generate(prompts, params, use_tqdm=False, **(more if self.adapters else {}))
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != concurrency * output_len:
            raise RuntimeError(f"the engine returned {made} tokens instead of {concurrency * output_len}")

    def run(self, load: dict[str, Any]) -> dict[str, Any]:
        """Return the figures of one load."""
        count, input_len, repeats = load["concurrency"], load["input_len"], self.job["repeats"]
        if load["workload"] == "A":
            step, spread, whole = measure(
                lambda outputs: self.generate(count, input_len, outputs, load["chosen"]), load["output_len"], repeats
            )
            rate = count * load["output_len"] / whole
            return {"ms_per_step": step, "spread_percent": spread, "tokens_per_second": rate}
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            self.generate(count, input_len, load["output_len"], load["chosen"])
            seconds.append(time.perf_counter() - started)
        middle = statistics.median(seconds[1:])  # the first run is a warm-up
        spread = 100 * (max(seconds[1:]) - min(seconds[1:])) / middle
        return {"ms_per_step": None, "spread_percent": spread, "tokens_per_second": count * input_len / middle}


def main(file: str) -> None:
    """Run the job of a file."""
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    engine = Engine(job)
    start = {"version": str(getattr(engine.module, "__version__", "unknown")), "start_up_seconds": engine.seconds}
    print(RESULT + json.dumps(start), flush=True)
    for load in job["loads"]:
        print(RESULT + json.dumps(engine.run(load)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
