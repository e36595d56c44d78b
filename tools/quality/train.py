"""Trains the evaluation models: `python -m sidestream.tools.quality.train -o DIR [--minutes 8] [--smoke]`.

Writes DIR/base (a checkpoint as transformers writes it), DIR/adapters/<name> (PEFT) and DIR/report.json (losses, speed,
accuracies, digests). No download: the data are the standard library's sources and questions that `tasks` makes. It
needs the `train` extra and, unless `--smoke`, a GPU.

Seeded, and every sum in one order: on the same kind of GPU, with the same releases of Python and torch, the models are
the same to the last bit.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from tokenizers import Tokenizer
from tqdm import tqdm

from .adapter_training import LlamaForCausalLM, get_peft_model, save_adapter, save_base
from .examine import accuracy, needle_accuracy, perplexity
from .models import ADAPTERS, BASE_NAME, model_config
from .tasks import TASKS
from .train_data import Job, Order, Rows, Workshop, split_jobs, tokenizer_texts, train_tokenizer

BASE_RATE, ADAPTER_RATE = 1.5e-3, 1.5e-3
NOMINAL_MINUTES = 8.0  # what the steps below take on an H200


@dataclass(frozen=True)
class Plan:
    """How much is trained. A phase is (width of a row in tokens, rows in a step, steps).

    adapter_tokens, retrieval_tokens   about how many tokens a step of an adapter has, of the one for retrieval
    retrieval_lengths                  widths of its rows, taking turns
    needles                            lengths of the needles that it is shown at the end, `needles_each` at each of
                                       DEPTHS
    """

    vocabulary: int = 4096
    documents: int = 4000
    phases: tuple[tuple[int, int, int], ...] = ((1024, 32, 5200), (8192, 4, 900), (32768, 1, 250))
    adapter_steps: int = 220
    adapter_tokens: int = 24576
    adapter_rows: int = 240_000
    exam_items: int = 500
    retrieval_tokens: int = 32769
    retrieval_lengths: tuple[int, ...] = (1024, 4096, 16384, 32768, 32768)
    needles: tuple[int, ...] = (4096, 8192, 16384, 32768)
    needles_each: int = 16
    compiled: bool = True

    def scaled(self, factor: float) -> "Plan":
        """The same with `factor` times the steps."""
        phases = tuple((width, rows, max(2, round(steps * factor))) for width, rows, steps in self.phases)
        return replace(self, phases=phases, adapter_steps=max(2, round(self.adapter_steps * factor)))


SMOKE = Plan(1024, 60, ((256, 4, 3), (512, 1, 2)), 2, 1024, 24, 2, 1024, (512,), (768,), 1, False)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Batches:
    """Rows on the device, given out in random order, epoch after epoch: ids int64 and loss weights fp32, both [rows,
    width + 1], padded with weight 0.
    """

    def __init__(self, rows: Rows, device: torch.device, seed: int) -> None:
        self._ids = torch.from_numpy(rows.ids.astype("int32")).to(device)
        self._weights = torch.from_numpy(rows.weights).to(device)
        self._lengths = torch.from_numpy(rows.lengths).to(device)
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._generator = torch.Generator().manual_seed(seed)
        self._count = len(rows.lengths)
        self._longest = int(rows.lengths.max())

    def endless(self, rows: int, width: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of `rows` rows; `width` = the longest row's if None."""
        columns = torch.arange((width or self._longest - 1) + 1, device=self._ids.device)
        while True:
            order = (
                torch.randperm(self._count, generator=self._generator)
                .repeat(math.ceil(rows / self._count))
                .to(self._ids.device)
            )
            for start in range(0, len(order) - rows + 1, rows):
                chosen = order[start : start + rows]
                inside = columns < self._lengths[chosen][:, None]
                places = (self._starts[chosen][:, None] + columns).clamp_(max=len(self._ids) - 1)
                yield (
                    torch.where(inside, self._ids[places], 1).long(),
                    torch.where(inside, self._weights[places], 0).float(),
                )


def fit(
    model: Any,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    rates: Callable[[int], float],
    steps: int,
    label: str,
) -> dict[str, float]:
    """Trains for `steps` steps, the rate of step i being rates(i).

    Returns the mean loss of the last tenth and tokens per second.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses: list[torch.Tensor] = []
    tokens, warm_tokens, started, warm = 0, 0, time.monotonic(), 0.0
    interval = 0.5 if sys.stderr.isatty() else 10.0
    with tqdm(total=steps, desc=label, unit="step", mininterval=interval, dynamic_ncols=True) as bar:
        for step in range(steps):
            ids, weights = next(batches)
            for group in optimizer.param_groups:
                group["lr"] = rates(step)
            with torch.autocast(ids.device.type, dtype=torch.bfloat16):
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            each = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
            )
            loss = (each * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            tokens += ids.shape[0] * (ids.shape[1] - 1)
            if step % 20 == 19 or step == steps - 1:  # reading a loss waits for the GPU: now and then only
                value, now = losses[-1].item(), time.monotonic()
                if warm == 0.0:
                    warm, warm_tokens = now, tokens
                speed = (tokens - warm_tokens) / (now - warm) if now > warm else tokens / (now - started)
                bar.set_postfix_str(f"loss {value:.3f}, {speed / 1e3:.0f}k tok/s", refresh=False)
            bar.update()
    tail = losses[-max(1, steps // 10) :]
    seconds = time.monotonic() - started
    result = {"loss": torch.stack(tail).mean().item(), "tokens": tokens, "tokens_per_s": speed, "seconds": seconds}
    print(
        f"{label}: {steps} steps, {tokens / 1e6:.1f} M tokens, {seconds:.1f} s, {speed / 1e3:.0f}k tok/s, loss "
        f"{result['loss']:.4f}",
        flush=True,
    )
    return result


def base_orders(plan: Plan, workshop: Workshop, seed: int) -> list[Order]:
    """Rows of each phase of the base model: questions of all tasks, library sources (in the first phase), and texts
    to look codes up in.
    """
    phases = []
    for index, (width, rows, steps) in enumerate(plan.phases):
        count, tokens = rows * steps, width + 1
        jobs: list[Job] = split_jobs(
            "mixed", int(count * (0.75, 0.35, 0.0)[index]), max(1, 2**18 // tokens), seed + index, tokens
        )
        if index == 0:
            parts = 32 if plan.compiled else 2
            jobs += [Job("corpus", plan.documents, part, tokens, of=parts) for part in range(parts)] * max(
                1, round(0.15 * count / plan.documents)
            )
        jobs += split_jobs(
            "hay", max(1, int(count * (0.1, 0.65, 1.0)[index])), max(1, 2**16 // tokens), seed + 10 + index, tokens
        )
        phases.append(workshop.order(jobs))
    return phases


def adapter_orders(plan: Plan, workshop: Workshop, seed: int, names: list[str]) -> dict[str, list[Order]]:
    """Rows of each adapter, in groups of one length where the lengths differ much."""
    adapters: dict[str, list[Order]] = {}
    for name in names:
        if name == "retrieval":
            steps = -(-adapter_steps(plan, name) // len(plan.retrieval_lengths))
            groups = [
                split_jobs(
                    "hay",
                    max(2, steps * round(plan.retrieval_tokens / length)),
                    max(1, 2**16 // length),
                    seed + 30 + place,
                    length + 1,
                    name,
                )
                for place, length in enumerate(plan.retrieval_lengths)
            ]
        else:
            # about two tokens in three letters
            letters = max(len(item.prompt) for item in TASKS[name].items(20, seed, "train"))
            count = min(
                plan.adapter_rows, max(32, int(adapter_steps(plan, name) * plan.adapter_tokens / (0.6 * letters)))
            )
            groups = [split_jobs("task", count, max(8, count // 32), seed + 20, 1024, name)]
        adapters[name] = [workshop.order(jobs) for jobs in groups]
    return adapters


def needle_orders(plan: Plan, workshop: Workshop, names: list[str]) -> dict[tuple[int, float], Order]:
    """Needles to show the retrieval adapter, by tokens and depth."""
    buckets = [(tokens, depth) for tokens in reversed(plan.needles) for depth in DEPTHS if "retrieval" in names]
    return {
        (tokens, depth): workshop.order([Job("needle", plan.needles_each, 0, tokens - 16, depth=depth)])
        for tokens, depth in buckets
    }


def adapter_steps(plan: Plan, name: str) -> int:
    """Training steps of an adapter."""
    return max(2, round(plan.adapter_steps * ADAPTERS[name].effort))


def train_base(model: Any, plan: Plan, phases: list[Order], device: torch.device, seed: int) -> dict[str, Any]:
    """All phases with one optimizer; the rate warms up, stays, and falls to zero over the last third."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=BASE_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    total = sum(steps for _, _, steps in plan.phases)
    if plan.compiled:
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    done, results = 0, {}
    for (width, rows, steps), order in zip(plan.phases, phases, strict=True):
        begun = time.monotonic()
        batches = Batches(order.rows(), device, seed + done).endless(rows, width)
        print(f"waited {time.monotonic() - begun:.1f} s for rows", flush=True)

        def rate(step: int, done: int = done) -> float:
            return BASE_RATE * min(1.0, (done + step + 1) / min(200, total / 4), (total - done - step) / (total / 3))

        results[str(width)] = fit(model, batches, optimizer, rate, steps, f"base, {width} tokens a row")
        done += steps
    return results


def train_adapter(
    model: Any, name: str, groups: list[Rows], plan: Plan, device: torch.device, seed: int
) -> tuple[Any, dict[str, float]]:
    """The base with the adapter on it, and how its training went; steps take turns between the groups of rows."""
    torch.manual_seed(seed)
    adapted = get_peft_model(model, ADAPTERS[name].config())
    adapted.train()
    optimizer = torch.optim.AdamW(
        [p for p in adapted.parameters() if p.requires_grad],
        lr=ADAPTER_RATE,
        weight_decay=0.01,
        fused=device.type == "cuda",
    )
    steps = adapter_steps(plan, name)

    def rate(step: int) -> float:
        return ADAPTER_RATE * min(1.0, (step + 1) / 20, (steps - step) / (steps / 2))

    tokens = plan.retrieval_tokens if name == "retrieval" else plan.adapter_tokens
    sources = [Batches(rows, device, seed).endless(max(1, round(tokens / int(rows.lengths.max())))) for rows in groups]
    return adapted, fit(adapted, (next(source) for source in cycle(sources)), optimizer, rate, steps, f"adapter {name}")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `python -m sidestream.tools.quality.train`."""
    parser = argparse.ArgumentParser(
        prog="python -m sidestream.tools.quality.train", description="Train the evaluation model and its adapters."
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--minutes",
        type=float,
        default=NOMINAL_MINUTES,
        help="about how long on an H200; scales the steps (default: %(default)s)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes on the CPU: shows that it works, the models know nothing"
    )
    parser.add_argument("--base", type=Path, metavar="DIR", help="take this trained base model and train adapters only")
    parser.add_argument(
        "--adapters",
        nargs="*",
        choices=sorted(ADAPTERS),
        default=list(ADAPTERS),
        help="train only these, or none (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        parser.error("training needs a GPU; --smoke runs anywhere")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # in the workers, which are processes already
    plan = SMOKE if options.smoke else Plan().scaled(options.minutes / NOMINAL_MINUTES)
    workshop = Workshop(1 if options.smoke else max(1, multiprocessing.cpu_count() - 1))
    try:
        with repeatable():
            report = train(plan, workshop, options.output, options.smoke, options.seed, options.base, options.adapters)
    finally:
        workshop.close()
    report["python"], report["torch"] = sys.version.split()[0], torch.__version__
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "report.json"
    if options.base and path.is_file():  # what this run did not train keeps its figures
        before = json.loads(path.read_text())
        report = before | report | {"tasks": before.get("tasks", {}) | report["tasks"]}
    path.write_text(json.dumps(report, indent=2) + "\n")
    return 0


@contextmanager
def repeatable() -> Iterator[None]:
    """Every kernel sums in an order that doesn't change; an operation that can't raises RuntimeError.

    To be entered before the GPU is used.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads such memory
    try:
        with torch._inductor.config.patch(deterministic=True):  # no choice of kernels by their measured time
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def digest(directory: Path) -> str:
    """The first 16 digits of the SHA-256 of a model's or an adapter's weights."""
    [path] = directory.glob("*.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def train(
    plan: Plan, workshop: Workshop, output: Path, smoke: bool, seed: int, trained: Path | None, names: list[str]
) -> dict[str, Any]:
    """Trains and writes the base, unless `trained` is one, and the adapters of these names; returns the report."""
    started = time.monotonic()
    device = torch.device("cpu" if smoke else "cuda")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "seed": seed,
        "plan": str(plan),
    }
    if trained:
        tokenizer: Tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
        workshop.use(tokenizer)
        adapters, needles = adapter_orders(plan, workshop, seed, names), needle_orders(plan, workshop, names)
    else:
        tokenizer = train_tokenizer(plan.vocabulary, tokenizer_texts(min(plan.documents, 1500), seed))
        workshop.use(tokenizer)
        phases, adapters, needles = (
            base_orders(plan, workshop, seed),
            adapter_orders(plan, workshop, seed, names),
            needle_orders(plan, workshop, names),
        )
        model: Any = LlamaForCausalLM(model_config(tokenizer, smoke)).to(device)
        print(
            f"{tokenizer.get_vocab_size()} tokens, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters",
            flush=True,
        )
        report["base"] = train_base(model, plan, phases, device, seed)
        trained = output / "base"
        save_base(model, tokenizer, trained)
        report["digest"] = digest(trained)
        print(f"base: digest {report['digest']}", flush=True)
    # a fresh one: no compiled layers, RoPE's frequencies in fp32
    model = LlamaForCausalLM.from_pretrained(trained, dtype=torch.bfloat16).to(device)
    report["base_s"] = time.monotonic() - started
    report["perplexity"] = perplexity(model, tokenizer, 4 if smoke else 200)
    print(
        f"base: perplexity {report['perplexity']:.3f} on held-out sources, {report['base_s']:.0f} s so far", flush=True
    )
    report["tasks"] = {}
    for name, groups in adapters.items():
        alone = accuracy(model, tokenizer, name, max(plan.exam_items // 5, 1), instructed=True)
        adapted, training = train_adapter(model, name, [order.rows() for order in groups], plan, device, seed)
        save_adapter(adapted, output / "adapters" / name, BASE_NAME)
        adapted.to(device).eval()
        begun = time.monotonic()
        result = accuracy(adapted, tokenizer, name, plan.exam_items) | {
            "perplexity": perplexity(adapted, tokenizer, 4 if smoke else 200)
        }
        weights = digest(output / "adapters" / name)
        report["tasks"][name] = {
            "digest": weights,
            "training": training,
            "base_instructed": alone,
            **result,
            "exam_s": time.monotonic() - begun,
        }
        levels = ", ".join(f"{level}: {share:.0%}" for level, share in result["levels"].items())
        print(
            f"{name}: right {result['right']:.1%} of {result['items']} (by level {levels}); the base alone, "
            f"instructed {alone['right']:.1%}; "
            f"perplexity {result['perplexity']:.3f}; {time.monotonic() - begun:.1f} s, digest {weights}",
            flush=True,
        )
        if name == "retrieval":
            begun = time.monotonic()
            found = {bucket: needle_accuracy(adapted, order.rows()) for bucket, order in sorted(needles.items())}
            report["needles"] = {f"{tokens}@{depth:g}": share for (tokens, depth), share in found.items()}
            for tokens in plan.needles:
                print(
                    f"needles of {tokens} tokens: "
                    + ", ".join(f"{found[tokens, depth]:.0%} at depth {depth:g}" for depth in DEPTHS),
                    flush=True,
                )
            print(f"{plan.needles_each} needles of each length and depth, {time.monotonic() - begun:.1f} s", flush=True)
        model = adapted.unload()
    report["total_s"] = time.monotonic() - started
    print(f"wrote {output}; {report['total_s']:.0f} s in all", flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
