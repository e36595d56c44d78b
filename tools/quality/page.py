"""docs/quality.md, written from what was measured."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .evaluate import Round
from .report import tables, verdicts
from .verdict import (
    FEWEST_DOCUMENTS,
    FEWEST_ITEMS,
    FEWEST_NEEDLES,
    FEWEST_TOKENS,
    LEAST_TOP_1,
    MOST_FLIPS,
    MOST_LOSS,
    MOST_MEAN_KL,
    MOST_NEEDLE_DIFFERENCE,
    MOST_PERPLEXITY_RATIO,
    MOST_POOLED_LOSS,
)

INTRODUCTION = f"""\
# Quality beside bf16

Each arm serves the same model and the same adapters in another way, and is compared with bf16 on the same documents, questions and batches.
"Identical to bf16" is said only where, for every adapter,

- the accuracy loss is below {MOST_LOSS * 100:g} point at its one-sided 95% bound, and below {MOST_POOLED_LOSS * 100:g} points over all adapters;
- answers flip at most {MOST_FLIPS:g} times as often as bf16's do when only the load changes (half as many sequences at once, in another order);
- mean KL(bf16 || arm) is at most {MOST_MEAN_KL} nats at its upper bound, top-1 agreement at least {LEAST_TOP_1:.0%}, and the perplexity ratio at most
  {MOST_PERPLEXITY_RATIO};
- needles of each length and depth are found within {MOST_NEEDLE_DIFFERENCE * 100:g} points, of at least {FEWEST_NEEDLES} each;
- and all that was asked at least {FEWEST_TOKENS:,} tokens in {FEWEST_DOCUMENTS} documents and {FEWEST_ITEMS:,} questions of each adapter.

What counts for KL, top-1 and perplexity is ordinary text (the standard library's sources, also where codes are hidden among it) and the answers that an adapter
was trained to give. What a task has drawn at random (operands, letters, names, the lines that state codes) is read too, but does not count: ten digits are
equally likely there, and which of them ranks first is a coin toss that a rounding in the last bit turns over. Those tokens have a table and columns of their
own, and each condition names the figure over all tokens beside its own.

The condition on flips asks for more than eight bits can hold: two runs of bf16 share their weights bit for bit, and eight bits
round a weight more coarsely than bf16 rounds an activation. What two ways to compute in 16 bits differ by is shown beside it: `bf16-unfused` rounds where
PyTorch's own modules do, as other engines' bf16 does.

Everywhere else the gap is named with its figure. Control arms have a planted fault and must fail, or the measurement would be blind.
A small clean model does not show what rowwise scales are for: the values of its channels are alike, and one scale per tensor does almost as well. Large Llamas
have outliers; the injected round puts such into the same model by exact rescaling (`tools/quality/outliers.py` says how), so that bf16's answers stay what
they are. What is injected into Q and K is massive in one of the two alone, as an exact rescaling makes it, and `balance_keys` (on by default) takes just that
back; `int8-not-balanced` goes without. Where a large Llama has the same channels massive in both, factors gain nothing, and the Hadamard transform is what
helps.
"""


def page(rounds: Sequence[Round], about: Mapping[str, Any], picture: Path | None, target: Path) -> str:
    """The page's Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = [
        INTRODUCTION,
        f"Measured by `sidestream eval` on {about['device']} in {about['seconds']:.0f} s: model {about['model']}, "
        f"adapters {', '.join(about['adapters']) or 'none'}, {about['suite']}; {versions}.\n",
    ]
    if picture is not None:
        parts.append(
            "![Mean KL divergence and accuracy loss of each "
            f"arm]({Path(os.path.relpath(picture, target.parent)).as_posix()})\n"
        )
    for found in rounds:
        parts.append(f"## {found.label.capitalize()}\n")
        parts.append(verdicts(found, markdown=True))
        parts += [table.markdown() for table in tables(found)]
    return "\n".join(parts)
