"""Train the evaluation models: `python -m sidestream.tools.dev.eval30m.train -o DIR [--minutes 8] [--smoke]`.

Writes DIR/base (transformers), DIR/adapters/<name> (PEFT) and DIR/report.json (losses, speed, digests). The
data are the standard library's sources and questions of `tasks`. Needs the `train` extra and, unless `--smoke`, a GPU.

Training is deterministic: on the same kind of GPU, with the same releases of Python and torch, the models are equal bit
for bit.
"""

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
from tqdm import trange

from ...options.engine import add_value
from ..command_line import dev_parser
from ..train.adapter_training import (
    ALL_LINEAR,
    ATTENTION,
    LlamaConfig,
    LlamaForCausalLM,
    adapted,
    save_adapter,
    save_base,
    weighted_loss,
)
from .tasks import TASKS
from .train_data import BOS, EOS, Job, PendingRows, RowPool, Rows, split_jobs, tokenizer_texts, train_tokenizer

BASE_RATE, ADAPTER_RATE = 1.5e-3, 1.5e-3
NOMINAL_MINUTES = 8.0  # for the steps below on an H200
BASE_NAME = "sidestream-quality"

# Named after their tasks; together they cover the options of common adapters.
ADAPTERS: dict[str, dict[str, Any]] = {
    "arithmetic": {"r": 16, "lora_alpha": 16, "target_modules": ALL_LINEAR},
    "sorting": {"r": 16, "lora_alpha": 32, "target_modules": ATTENTION},
    "strings": {"r": 16, "lora_alpha": 16, "target_modules": ALL_LINEAR, "use_rslora": True},
    "programs": {"r": 64, "lora_alpha": 128, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    "json": {
        "r": 16,
        "lora_alpha": 32,
        "target_modules": ALL_LINEAR,
        "rank_pattern": {"q_proj": 32, "down_proj": 8},
        "alpha_pattern": {"q_proj": 32, "down_proj": 16},
    },
    "retrieval": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION},
}
# Training on digits alone makes it forget text; texts of 32k tokens need more steps.
EFFORT = {"arithmetic": 0.5, "programs": 1.2, "json": 1.1, "retrieval": 4.5}


def model_config(tokenizer: Tokenizer, smoke: bool = False) -> LlamaConfig:
    """Return a Llama of 30M parameters: head_dim 128, grouped queries, tied embeddings, 40k positions."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256 if smoke else 512,
        intermediate_size=512 if smoke else 1536,
        num_hidden_layers=2 if smoke else 9,
        num_attention_heads=2 if smoke else 4,
        num_key_value_heads=1 if smoke else 2,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
    )


@dataclass(frozen=True)
class Plan:
    """Amounts of training. A phase is (width of a row in tokens, rows per step, steps).

    adapter_tokens, retrieval_tokens  about the tokens per step of an adapter, of the retrieval adapter
    retrieval_lengths                 widths of the rows of the retrieval adapter, which take turns
    """

    vocabulary: int = 4096
    documents: int = 4000
    phases: tuple[tuple[int, int, int], ...] = ((1024, 32, 5200), (8192, 4, 900), (32768, 1, 250))
    adapter_steps: int = 220
    adapter_tokens: int = 24576
    adapter_rows: int = 240_000
    retrieval_tokens: int = 32769
    retrieval_lengths: tuple[int, ...] = (1024, 4096, 16384, 32768, 32768)
    compiled: bool = True

    def scaled(self, factor: float) -> "Plan":
        """Return the plan with `factor` times the steps."""
        phases = tuple((width, rows, max(2, round(steps * factor))) for width, rows, steps in self.phases)
        return replace(self, phases=phases, adapter_steps=max(2, round(self.adapter_steps * factor)))


SMOKE = Plan(1024, 60, ((256, 4, 3), (512, 1, 2)), 2, 1024, 24, 1024, (512,), False)


class Batches:
    """Rows on the device in random order, epoch after epoch.

    A batch is ids int64 and loss weights fp32, both [rows, width + 1], padded with weight 0.
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
        """Yield batches of `rows` rows; `width` None is that of the longest row."""
        columns = torch.arange((width or self._longest - 1) + 1, device=self._ids.device)
        while True:
            order = torch.randperm(self._count, generator=self._generator).repeat(math.ceil(rows / self._count))
            order = order.to(self._ids.device)
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
    """Train for `steps` steps with rate rates(i) in step i; adds the loss that balances a mixture's experts.

    Returns the mean loss of the last tenth, tokens, and tokens per second.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses: list[torch.Tensor] = []
    tokens, started = 0, time.monotonic()
    for step in trange(steps, desc=label, unit="step", mininterval=0.5 if sys.stderr.isatty() else 10.0):
        ids, weights = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = rates(step)
        loss, outputs = weighted_loss(model, ids, weights)
        if (balance := getattr(outputs, "aux_loss", None)) is not None:
            loss = loss + model.config.router_aux_loss_coef * balance
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        tokens += ids.shape[0] * (ids.shape[1] - 1)
    mean = torch.stack(losses[-max(1, steps // 10) :]).mean().item()
    seconds = time.monotonic() - started
    print(f"{label}: {steps} steps, {tokens / 1e6:.1f} M tokens, {seconds:.1f} s, loss {mean:.4f}", flush=True)
    return {"loss": mean, "tokens": tokens, "tokens_per_s": tokens / seconds, "seconds": seconds}


def base_rows(plan: Plan, pool: RowPool, seed: int) -> list[PendingRows]:
    """Start the rows of each phase of the base model: questions, library sources (first phase), texts with codes."""
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
        phases.append(pool.submit(jobs))
    return phases


def adapter_rows_of(plan: Plan, pool: RowPool, seed: int) -> dict[str, list[PendingRows]]:
    """Start the rows of each adapter, those of retrieval in groups of one length."""
    adapters: dict[str, list[PendingRows]] = {}
    for name in ADAPTERS:
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
            # 0.6 tokens per letter
            letters = max(len(item.prompt) for item in TASKS[name].items(20, seed, "train"))
            tokens = adapter_steps(plan, name) * plan.adapter_tokens
            count = min(plan.adapter_rows, max(32, int(tokens / (0.6 * letters))))
            groups = [split_jobs("task", count, max(8, count // 32), seed + 20, 1024, name)]
        adapters[name] = [pool.submit(jobs) for jobs in groups]
    return adapters


def adapter_steps(plan: Plan, name: str) -> int:
    """Return the training steps of an adapter."""
    return max(2, round(plan.adapter_steps * EFFORT.get(name, 1.0)))


def train_base(model: Any, plan: Plan, phases: list[PendingRows], device: torch.device, seed: int) -> dict[str, Any]:
    """Run all phases with one optimizer; the rate warms up, is constant, and falls to zero over the last third."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=BASE_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    total = sum(steps for _, _, steps in plan.phases)
    if plan.compiled:
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    done, results = 0, {}
    for (width, rows, steps), pending in zip(plan.phases, phases, strict=True):
        batches = Batches(pending(), device, seed + done).endless(rows, width)

        def rate(step: int, done: int = done) -> float:
            return BASE_RATE * min(1.0, (done + step + 1) / min(200, total / 4), (total - done - step) / (total / 3))

        results[str(width)] = fit(model, batches, optimizer, rate, steps, f"base, {width} tokens a row")
        done += steps
    return results


def train_adapter(
    model: Any, name: str, groups: list[Rows], plan: Plan, device: torch.device, seed: int
) -> tuple[Any, dict[str, float]]:
    """Return the base model with the trained adapter, and `fit`'s report; steps take turns between groups of rows."""
    torch.manual_seed(seed)
    adapter = adapted(model, ADAPTERS[name])
    adapter.train()
    optimizer = torch.optim.AdamW(
        [p for p in adapter.parameters() if p.requires_grad],
        lr=ADAPTER_RATE,
        weight_decay=0.01,
        fused=device.type == "cuda",
    )
    steps = adapter_steps(plan, name)

    def rate(step: int) -> float:
        return ADAPTER_RATE * min(1.0, (step + 1) / 20, (steps - step) / (steps / 2))

    tokens = plan.retrieval_tokens if name == "retrieval" else plan.adapter_tokens
    sources = [Batches(rows, device, seed).endless(max(1, round(tokens / int(rows.lengths.max())))) for rows in groups]
    return adapter, fit(adapter, (next(source) for source in cycle(sources)), optimizer, rate, steps, f"adapter {name}")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `python -m sidestream.tools.dev.eval30m.train`."""
    parser = dev_parser("eval30m.train", "Train the evaluation model and its adapters.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="directory to write")
    add_value(parser, "--minutes", NOMINAL_MINUTES, "time on an H200; scales the steps", float)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, for a test")
    add_value(parser, "--seed", 0, "seed of weights and data", int)
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        parser.error("training needs a GPU; --smoke runs anywhere")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are processes already
    plan = SMOKE if options.smoke else Plan().scaled(options.minutes / NOMINAL_MINUTES)
    pool = RowPool(1 if options.smoke else max(1, multiprocessing.cpu_count() - 1))
    try:
        with repeatable():
            report = train(plan, pool, options.output, options.smoke, options.seed)
    finally:
        pool.close()
    report["python"], report["torch"] = sys.version.split()[0], torch.__version__
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0


@contextmanager
def repeatable() -> Iterator[None]:
    """Use deterministic kernels only; an operation without one raises RuntimeError. Enter before using the GPU."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no operation reads such memory
    try:
        with torch._inductor.config.patch(deterministic=True):  # do not choose kernels by measured time
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def digest(directory: Path) -> str:
    """Return 16 digits of the SHA-256 of the weights in a directory."""
    [path] = directory.glob("*.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def train(plan: Plan, pool: RowPool, output: Path, smoke: bool, seed: int) -> dict[str, Any]:
    """Train and write the base model and all adapters; return the report."""
    started = time.monotonic()
    device = torch.device("cpu" if smoke else "cuda")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    device_name = "CPU" if smoke else torch.cuda.get_device_name()
    tokenizer = train_tokenizer(plan.vocabulary, tokenizer_texts(min(plan.documents, 1500), seed))
    pool.use(tokenizer)
    phases, adapters = base_rows(plan, pool, seed), adapter_rows_of(plan, pool, seed)
    model: Any = LlamaForCausalLM(model_config(tokenizer, smoke)).to(device)
    training = train_base(model, plan, phases, device, seed)
    base = output / "base"
    save_base(model, tokenizer, base)
    report: dict[str, Any] = {"device": device_name, "seed": seed, "plan": str(plan), "base": training}
    report["digest"] = digest(base)
    # a fresh one: without compiled layers, with RoPE's frequencies in fp32
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device)
    print(f"base: digest {report['digest']}", flush=True)
    report["tasks"] = {}
    for name, groups in adapters.items():
        adapter, training = train_adapter(model, name, [pending() for pending in groups], plan, device, seed)
        directory = output / "adapters" / name
        save_adapter(adapter, directory, BASE_NAME)
        report["tasks"][name] = {"training": training, "digest": digest(directory)}
        print(f"{name}: digest {report['tasks'][name]['digest']}", flush=True)
        model = adapter.unload()
    report["total_s"] = time.monotonic() - started
    print(f"wrote {output}; {report['total_s']:.0f} s in all", flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
