"""What a step costs the host, with drafts and without: `python -m sidestream.tools.dev.bench.drafts.host_work [MODEL]`.

MODEL is a model's directory; left out, it is the demo model. `--concurrency` sequences decode, all greedy and then all
drawn, in an engine without speculation and in one with `--drafts` a step. Printed are microseconds, medians over the
steps in which all sequences decode: of the call that starts a step, of the one that waits for its tokens, and from one
start to the next. On a GPU also what a step asks of the driver: means over a run's steps, of which few are prompts'.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .....runtime.api.sampling_params import SamplingParams
from ....options.engine import positive

PROMPT_TOKENS = 32
CALLS = {
    "graphs": ("cudaGraphLaunch",),
    "kernels": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "copies": ("cudaMemcpyAsync",),
    "events": ("cudaEventRecord", "cudaEventRecordWithFlags", "cudaStreamWaitEvent"),
    "pinned": ("cudaHostAlloc",),
}
"""What is counted, and the driver's names of it."""


class Watched:
    """In place of a runner's `submit` and `collect`: notes what they take while all `sequences` decode."""

    def __init__(self, runner: Any, sequences: int) -> None:
        self._runner, self._sequences = runner, sequences
        self._submit, self._collect = runner.submit, runner.collect
        self._counts: set[int] = set()
        self._last: tuple[int, float] = (-2, 0.0)
        self.starts: list[float] = []
        self.waits: list[float] = []
        self.steps: list[float] = []
        runner.submit, runner.collect = self.submit, self.collect

    def stop(self) -> None:
        """Let the runner be called by itself again."""
        self._runner.submit, self._runner.collect = self._submit, self._collect

    def submit(self, plan: Any) -> Any:
        """See `Runner`."""
        begin = time.perf_counter()
        handle = self._submit(plan)
        if (plan.decode or plan.verifies) and plan.num_sequences == self._sequences:
            self._counts.add(plan.step)
            self.starts.append(time.perf_counter() - begin)
            if self._last[0] == plan.step - 1:
                self.steps.append(begin - self._last[1])
            self._last = plan.step, begin
        return handle

    def collect(self, handle: Any) -> Any:
        """See `Runner`."""
        begin = time.perf_counter()
        result = self._collect(handle)
        if result.step in self._counts:
            self.waits.append(time.perf_counter() - begin)
        return result


def driver_calls(run: Callable[[], object], steps: Callable[[], int]) -> dict[str, float]:
    """What `run` asks of the driver for each of its steps, which `steps` counts since the start."""
    from torch.profiler import ProfilerActivity, profile

    before = steps()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
    made = {event.key: event.count for event in found.key_averages()}
    return {label: sum(made.get(name, 0) for name in names) / (steps() - before) for label, names in CALLS.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--drafts", type=positive, default=3)
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--output-len", type=positive, default=192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    from ..... import LLM

    on_gpu = options.device == "cuda"
    heads = ("start", "wait", "step", *(CALLS if on_gpu else ()))
    print(f"{'speculation':<13}{'rows':<9}{'at once':>8}" + "".join(f"{head:>9}" for head in heads))
    model = () if options.model is None else (options.model,)
    source = random.Random(0)
    prompts = [
        {"prompt_token_ids": [source.randrange(3, 200) for _ in range(PROMPT_TOKENS)]}
        for _ in range(max(options.concurrency))
    ]
    for speculation in ("off", options.drafts):
        with LLM(
            *model,
            speculation=speculation,
            device=options.device,
            max_num_seqs=max(options.concurrency),
            max_model_len=PROMPT_TOKENS + options.output_len + 16,
            gpu_memory_utilization=0.3,
            show_progress=False,
        ) as llm:
            for temperature in (0.0, 0.8):
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=options.output_len, ignore_eos=True)
                for count in options.concurrency:

                    def run(count: int = count, params: SamplingParams = params, llm: Any = llm) -> None:
                        llm.generate(prompts[:count], params, use_tqdm=False)

                    run()  # what is compiled and captured late
                    watched = Watched(llm.engine.runner, count)
                    run()
                    watched.stop()
                    parts = watched.starts, watched.waits, watched.steps
                    cells = [f"{1e6 * statistics.median(part):>9.0f}" for part in parts]
                    if on_gpu:
                        calls = driver_calls(run, lambda llm=llm: llm.engine.scheduler.states.step)  # type: ignore[misc]
                        cells += [f"{value:>9.2f}" for value in calls.values()]
                    rows = "drawn" if temperature else "greedy"
                    print(f"{speculation:<13}{rows:<9}{count:>8}" + "".join(cells), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
