"""docs/quality.md, written from what was measured."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .evaluate import Round
from .report import tables, verdicts
from .summary import summary
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

TITLE = "# Quality compared with bf16\n"
OWN_MODEL = """\
## A model of our own with six adapters

The real model is read; this one of 30M parameters is also asked. Its tasks have exact answers, so accuracy and flips can be counted.
"""
INTRODUCTION = f"""\
## What is compared

Each arm serves the same model and the same adapters in another way. It is compared with bf16 on the same documents, questions and batches.
We say "identical to bf16" only where, for every adapter,

- the accuracy loss is below {MOST_LOSS * 100:g} point at its one-sided 95% bound, and below {MOST_POOLED_LOSS * 100:g} points over all adapters;
- answers flip at most {MOST_FLIPS:g} times as often as those of bf16 computed in another way (`bf16-unfused`);
- mean KL(bf16 || arm) is at most {MOST_MEAN_KL} nats at its upper bound, top-1 agreement at least {LEAST_TOP_1:.0%}, and the perplexity ratio at most
  {MOST_PERPLEXITY_RATIO};
- needles of each length and depth are found within {MOST_NEEDLE_DIFFERENCE * 100:g} points, of at least {FEWEST_NEEDLES} each;
- and all that was asked at least {FEWEST_TOKENS:,} tokens in {FEWEST_DOCUMENTS} documents and {FEWEST_ITEMS:,} questions of each adapter.

KL, top-1 and perplexity count ordinary text (the standard library's sources, also where codes are hidden among it) and the answers that an adapter
was trained to give. They do not count what a task draws at random: operands, letters, names, and the lines that state codes. Ten digits are equally likely
there, and a rounding in the last bit decides which of them ranks first. The model reads those tokens too; they have a table and columns of their own, and each
condition names the figure over all tokens after its own figure.

Flips are compared with the arm `bf16-unfused`. It rounds where PyTorch's own modules do, as other engines' bf16 does, so it shows what two ways to compute in
16 bits differ by. `bf16 again` is the same program at another load (half as many sequences at once, in another order); it shows what the load alone changes.

For every other arm the page names the gap and its figure. Control arms have a planted fault. They must fail; if one passes, the measurement is blind.

A small clean model does not show what rowwise scales are for: the values of its channels are about equally large, so one scale per tensor does almost as well. Large Llamas
have outliers. The injected round puts outliers into the same model by exact rescaling (`tools/quality/outliers.py` says how), and bf16's answers stay what
they are. An exact rescaling of Q and K makes a channel massive in only one of the two. `balance_keys` (on by default) undoes exactly that;
the arm `int8-not-balanced` runs without it. Where a large Llama has the same channels massive in both, such factors gain nothing, and the Hadamard transform helps.
"""


def page(
    rounds: Sequence[Round],
    about: Mapping[str, Any],
    picture: Path | None,
    target: Path,
    models: str = "",
    real: str = "",
    release: str = "",
    today: str = "",
) -> str:
    """The page's Markdown, to be written to `target`; `models`: a paragraph about the models that were asked, `real`:
    what was measured on the real model, which comes first. `release`: the former release whose default `rounds` have,
    `today`: a paragraph about the present one.
    """
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = [
        TITLE,
        *([real, OWN_MODEL] if real else []),
        *([today] if today else []),
        *(summary(found, release) for found in rounds[:1]),
        INTRODUCTION,
        f"Measured by `sidestream eval` on {about['device']} in {about['seconds']:.0f} s: model {about['model']}, "
        f"adapters {', '.join(about['adapters']) or 'none'}, {about['suite']}; {versions}.\n",
        *([models] if models else []),
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
