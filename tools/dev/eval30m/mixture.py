"""Quality of int8 on a mixture of experts: `python -m sidestream.tools.dev.eval30m.mixture -o DIR`.

Trains a small mixture and a dense model with as many active parameters (`mixture_train`) unless DIR has them, with two
adapters each, and reads held-out texts and questions with both precisions. Prints KL(bf16 || arm), top-1 and perplexity
of each adapter, the share of tokens whose experts are those of bf16 in each layer, and the conditions of `verdict`
about texts. `fp32` shows the distance of bf16 itself. The control is int8 with a router in int8: it must miss the
condition about experts.
Runs on the CPU.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....compiler.options import Precision
from ....compiler.pass_records import columns
from ....ops.core.kv_layout import PAGE_SIZE
from ....ops.elementwise.quantize import reference as quantize_rowwise
from ....ops.moe.route import moe_route
from ....runtime.llm import LLM
from ....runtime.worker.calibrate.scorer import Chunk, Document, Scorer, plan, step_sizes
from ...eval.divergence import Divergence, divergences
from ...eval.evaluate import ArmResult
from ...eval.teacher_forced import compare
from ...options.engine import add_value
from ..command_line import dev_parser
from .mixture_train import ADAPTERS, MODELS, SMOKE, Plan, train_models
from .suite import adapter_documents
from .verdict import MOST_FLIPS, SLACK, Condition, State, conditions

SEQUENCES = 8
STEP_TOKENS = 1024
ROUTE = "sidestream.moe_route"
CONTROL = "int8, router in int8"
PRECISIONS: dict[str, Precision] = {"fp32": "fp32", "int8": "int8", CONTROL: "int8"}


@dataclass(frozen=True)
class Arm:
    """Figures of one arm on one model; `agreement` is the share of tokens with the same experts, by layer."""

    name: str
    divergences: list[Divergence]
    agreement: list[float]


def judged(arm: Arm, noise: Sequence[float]) -> list[Condition]:
    """Return the conditions of "identical to bf16" about texts, and that about experts. `noise`: agreement of fp32."""
    found = conditions(ArmResult(arm.name, "", arm.divergences), None)
    texts = [each for each in found if each.state in ("met", "missed")]
    if not arm.agreement:
        return texts
    changed, limit = 1 - min(arm.agreement), MOST_FLIPS * (1 - min(noise))
    state: State = "met" if changed <= limit + SLACK else "missed"
    rule = f"<= {limit:.2%}, {MOST_FLIPS:g} times those between bf16 and fp32"
    return [*texts, Condition("tokens with other experts in the worst layer", f"{changed:.2%}", rule, state)]


class Routes:
    """Records the experts of all rows that a scorer computes; `quantized` computes the router in int8 instead."""

    def __init__(self, scorer: Scorer, quantized: bool = False) -> None:
        self.layers: dict[int, list[torch.Tensor]] = {}
        self._scorer, self._quantized = scorer, quantized
        scorer.on_step = self

    def __call__(self, step: Any, outs: tuple[torch.Tensor, ...]) -> None:
        """Handle one step of the program."""
        if step.op != ROUTE:
            return
        if self._quantized:
            for out, value in zip(outs, route_in_int8(*self._scorer.bound.arguments(step.index)), strict=True):
                out.copy_(value)
        experts = outs[0][outs[0][:, 0] >= 0]
        self.layers.setdefault(step.index, []).append(experts.sort(1).values.clone())

    def agreement(self, other: "Routes") -> list[float]:
        """Return the share of rows with the same experts in each layer."""
        pairs = zip(self.layers.values(), other.layers.values(), strict=True)
        return [float((torch.cat(mine) == torch.cat(theirs)).all(1).double().mean()) for mine, theirs in pairs]


def route_in_int8(
    x: torch.Tensor, weight: torch.Tensor, delta: Any, slot_mapping: torch.Tensor, top_k: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `moe_route` with rows, weight and logits in int8, with a scale for each row."""
    logits = in_int8(x.float()) @ in_int8(weight.float()).T
    logits = in_int8(logits if delta is None else logits + delta.float())
    one = torch.eye(weight.shape[0])
    experts, weights = moe_route.reference(logits, one, None, slot_mapping, top_k, normalize)
    return experts, weights


def in_int8(values: torch.Tensor) -> torch.Tensor:
    """Return values [N, K] fp32 rounded to int8 with a scale for each row."""
    steps, scale = quantize_rowwise(values, torch.int8)
    return steps.float() * scale[:, None]


class Remembered:
    """The logits of a scorer, each step computed once."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.device = scorer, scorer.device
        self._known: dict[int, torch.Tensor] = {}

    def logits(self, step: Sequence[Chunk], documents: Sequence[Document]) -> torch.Tensor:
        """Return [tokens of the step, vocabulary]; steps are told apart by identity."""
        if id(step) not in self._known:
            self._known[id(step)] = self.scorer.logits(step, documents).clone()
        return self._known[id(step)]


def examine(directory: Path, documents: Sequence[Document], progress: Callable[[str], None]) -> list[Arm]:
    """Return the figures of all arms of PRECISIONS for base and adapters of a directory."""
    adapters = {name: directory / "adapters" / name for name in ADAPTERS}
    longest = max(len(document.tokens) for document in documents)
    _, *sizes = step_sizes(Plan().vocabulary, longest, on_cpu=True)
    shape = STEP_TOKENS, *sizes
    steps = list(plan([len(document.tokens) for document in documents], *shape[:3]))

    def opened(precision: Precision) -> Scorer:
        llm = LLM(
            directory / "base",
            adapters,
            device="cpu",
            precision=precision,
            calibration="off",
            rounded_weights="off",
            max_model_len=-(-longest // PAGE_SIZE) * PAGE_SIZE,
            max_num_seqs=SEQUENCES,
            num_kv_pages=shape[2],
            enforce_eager=True,
            show_progress=False,
        )
        return Scorer(llm.model, *shape)

    first = opened("bf16")
    reference, theirs, arms = Remembered(first), Routes(first), list[Arm]()
    for name, precision in PRECISIONS.items():
        if name == CONTROL and not theirs.layers:
            continue
        scorer = opened(precision)
        mine = Routes(scorer, name == CONTROL)
        found = divergences(compare(reference, scorer, documents, steps), documents)
        arms.append(Arm(name, found, theirs.agreement(mine)))
        progress(f"{directory.name}: {name}")
    return arms


def tables(found: dict[str, list[Arm]]) -> str:
    """Return all tables, and the limits that each arm misses."""
    read: list[Sequence[str]] = [("model", "arm", "adapter", "tokens", "mean KL", "at most", "top-1", "perplexity")]
    routed: list[Sequence[str]] = []
    lines = []
    for model, arms in found.items():
        for arm in arms:
            for one in arm.divergences:
                kl, top = one.mean_kl, one.top_1[0]
                figures = f"{kl[0]:.2e}", f"{kl[2]:.2e}", f"{top:.2%}", f"{one.perplexity_ratio[0]:.4f}"
                read.append((model, arm.name, one.adapter, f"{one.tokens:,}", *figures))
            if arm.agreement:
                routed.append((arm.name, *(f"{share:.2%}" for share in arm.agreement)))
            lines += [f"{model}, {arm.name}:", *(f"    {each}" for each in judged(arm, arms[0].agreement))]
    head = "arm", *(f"layer {layer}" for layer in range(max(map(len, routed), default=1) - 1))
    return (
        f"KL(bf16 || arm) in nats per token, with its upper bound, and perplexity as a ratio to bf16's\n\n"
        f"{columns(read, range(3, 8))}\nShare of tokens with the experts of bf16, all adapters together\n\n"
        f"{columns([head, *routed], range(1, len(head)))}\n" + "\n".join(lines)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, and measure; return 1 if the control meets the condition about experts."""
    parser = dev_parser("eval30m.mixture", __doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="directory of the models")
    add_value(parser, "--documents", 16, "texts")
    add_value(parser, "--tasks", 60, "questions")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, for a test")
    add_value(parser, "--seed", 0, "seed of weights and data", int)
    add_value(parser, "--threads", 2, "CPU threads; another number gives other weights")
    options: Namespace = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if not all((options.output / name / "base" / "config.json").is_file() for name in MODELS):
        train_models(SMOKE if options.smoke else Plan(), options.output, options.seed)
    names = list(ADAPTERS)
    documents = adapter_documents(options.output / MODELS[0] / "base", names, options.documents, options.tasks, 512)
    found = {
        name: examine(options.output / name, documents, lambda stage: print(stage, file=sys.stderr, flush=True))
        for name in MODELS
    }
    print(tables(found))
    fp32, *_, control = found[MODELS[0]]
    return 0 if judged(control, fp32.agreement)[-1].state == "missed" else 1


if __name__ == "__main__":
    sys.exit(main())
