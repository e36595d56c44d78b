"""Train a draft for a model and a LoRA of the draft for each of its adapters.

    python -m sidestream.tools.dev.drafts.train MODEL --adapters DIR -o HEAD

MODEL is a Llama's directory, or SmolLM2's GGUF (default: the demo model). DIR has a directory for each adapter. The
model answers questions that the bench of drafts does not ask, with each adapter and without. The head learns the
model's probabilities of each token of its answers, with an unrolled chain, so that it learns to continue from its own
hidden states. Then each adapter's LoRA learns the same from that adapter's answers.

HEAD becomes a directory with an EAGLE-3 head for `--draft HEAD`; the LoRA of each adapter is written into its own
directory, as `draft/`. Needs the `train` extra. The demo model takes two minutes on a CPU.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ....graphs.checkpoint import checkpoint_config
from ...options.engine import add_value, at_least, check_output_directory
from ..bench.drafts.real import add_subject, subject
from ..command_line import dev_parser
from .data import Answer, Target, drafted_vocabulary, own_answers
from .head import Batch, Head, check_family, feature_layers, losses

RATE, LORA_RATE = 1e-3, 2e-3
REPORTED = 50
"""Steps between two lines of the report."""
EXAMINED = 4
"""Batches of held-out answers for the report."""
APART = 10
"""One in so many answers is held out."""


def fit(
    head: Head,
    parameters: Sequence[torch.nn.Parameter],
    batches: Iterator[Batch],
    examined: Sequence[Batch],
    steps: int,
    rate: float,
    depth: int,
    label: str,
) -> list[float]:
    """Train `parameters` for `steps` steps; return the share of right drafts of each chain step in `examined`."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    begin = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        batch = next(batches)
        with torch.autocast(batch.tokens.device.type, dtype=torch.bfloat16, enabled=batch.tokens.is_cuda):
            loss, _, _ = losses(head, batch, depth)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % REPORTED == REPORTED - 1 or step == steps - 1:
            chances = examine(head, examined, depth)
            shown = " ".join(f"{chance:.2f}" for chance in chances)
            taken = time.monotonic() - begin
            print(
                f"{label}: step {step + 1} of {steps}, loss {loss.item():.3f}, right {shown}, {taken:.0f} s", flush=True
            )
    return examine(head, examined, depth)


@torch.no_grad()
def examine(head: Head, batches: Sequence[Batch], depth: int) -> list[float]:
    """Return the share of rows of each chain step that draft the target's most likely token."""
    held, tried = [0.0] * depth, [1e-9] * depth
    for batch in batches:
        _, right, rows = losses(head, batch, depth)
        held = [a + b for a, b in zip(held, right, strict=True)]
        tried = [a + b for a, b in zip(tried, rows, strict=True)]
    return [a / b for a, b in zip(held, tried, strict=True)]


def apart(
    answers: dict[str | None, list[Answer]],
) -> tuple[dict[str | None, list[Answer]], dict[str | None, list[Answer]]]:
    """Return (answers to train on, held-out ones): one in APART of each adapter, since tasks are in order."""
    return (
        {adapter: [one for place, one in enumerate(mine) if place % APART] for adapter, mine in answers.items()},
        {adapter: mine[::APART] for adapter, mine in answers.items()},
    )


def train(options: argparse.Namespace, model: Path, adapters: dict[str, str]) -> dict[str, Any]:
    """Train and write; return the report."""
    written = json.loads((model / "config.json").read_text())
    check_family(written)
    config = checkpoint_config(model)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    begin = time.monotonic()
    engine = {"device": str(device), "precision": options.precision}
    if options.max_model_len is not None:
        engine["max_model_len"] = options.max_model_len
    if device.type == "cuda":
        engine["gpu_memory_utilization"] = 0.5
    else:
        engine["max_num_seqs"] = 64
    answers = own_answers(
        model, adapters, options.questions, options.max_tokens, options.prompts, options.seed, **engine
    )
    for adapter, mine in answers.items():
        tokens = sum(len(answer.tokens) - answer.begin for answer in mine)
        print(f"{adapter or 'base'}: {len(mine)} answers of {tokens} tokens", flush=True)
    print(f"{time.monotonic() - begin:.0f} s for the model's own answers", flush=True)
    learned, held_out = apart(answers)
    everything = [answer for mine in learned.values() for answer in mine]
    vocabulary = drafted_vocabulary(everything, options.vocabulary, config.vocab_size)
    layers = feature_layers(config.num_hidden_layers)
    target = Target(model, adapters, layers, vocabulary, device)
    torch.manual_seed(options.seed)
    head = Head(config, layers, vocabulary, target.state["model.embed_tokens.weight"].cpu()).to(device)
    head.begin_as(target.state, options.seed)
    base: dict[str | None, list[Answer]] = {None: learned[None]} if None in learned else learned
    of_head = learned if options.mixed else base
    report: dict[str, Any] = {"layers": layers, "draft_vocab_size": len(vocabulary), "right": {}}

    def examined(adapter: str | None) -> list[Batch]:
        mine, rows = held_out[adapter], options.rows
        some = mine[:: max(1, len(mine) // (rows * EXAMINED))]
        parts = [some[first : first + rows] for first in range(0, min(len(some), rows * EXAMINED), rows)]
        return [target.batch(part, adapter, options.longest) for part in parts]

    looked_at = examined(None if None in of_head else next(iter(of_head)))
    batches = target.batches(of_head, options.rows, options.longest, options.seed)
    report["right"]["head"] = fit(
        head, list(head.parameters()), batches, looked_at, options.steps, RATE, options.depth, "head"
    )
    head.save(options.output, written)
    for name, path in adapters.items():
        if not learned.get(name) or not options.lora_steps:
            print(f"{name}: no LoRA of the draft is trained", flush=True)
            continue
        alone: dict[str | None, list[Answer]] = {name: learned[name]}
        looked_at = examined(name)
        head.lora = {}
        before = examine(head, looked_at, options.depth)
        lora = head.add_lora(options.rank, 2 * options.rank, options.seed)
        batches = target.batches(alone, options.rows, options.longest, options.seed)
        after = fit(head, lora, batches, looked_at, options.lora_steps, LORA_RATE, options.depth, f"LoRA of {name}")
        report["right"][name] = {"head alone": before, "with its LoRA": after}
        shown = [" ".join(f"{chance:.2f}" for chance in each) for each in (before, after)]
        print(f"{name}: right {shown[0]} without its LoRA, {shown[1]} with it", flush=True)
        head.save_lora(Path(path))
    report["seconds"] = time.monotonic() - begin
    print(f"wrote {options.output}; {report['seconds']:.0f} s in all", flush=True)
    return report


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = dev_parser("drafts.train", __doc__)
    add_subject(made, questions=500, precision="bf16")
    made.add_argument("-o", "--output", type=Path, required=True, metavar="HEAD", help="directory to write")
    add_value(made, "--steps", 600, "of the head", at_least(2))
    add_value(made, "--lora-steps", 200, "of each adapter's LoRA", at_least(0))
    add_value(made, "--rank", 16, "of these LoRAs")
    add_value(made, "--rows", 16, "answers of a step")
    add_value(made, "--depth", 5, "steps of the unrolled chain")
    add_value(made, "--longest", 512, "tokens of an answer's end")
    add_value(made, "--vocabulary", 8192, "tokens to draft", at_least(16))
    made.add_argument("--mixed", action="store_true", help="the head learns the adapters' answers too")
    add_value(made, "--seed", 0, "of weights, answers and their order", int)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the training."""
    options = parser().parse_args(arguments)
    try:
        check_output_directory("-o", options.output)
        model, adapters = subject(options.model, options.adapters)
        report = train(options, model, adapters)
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    (options.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
