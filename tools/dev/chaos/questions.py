"""The models under attack, and questions with known answers.

The demo model's answers are those of its `prompts.json`. A random model's answers, and those of random adapters, are
measured on the server before the attacks. There two tokens may be about equally likely, and on a GPU the rest of the
batch decides between them: an answer may leave the measured one at such a tie, and its rest is not judged. In eight
bits answers of random weights also stray elsewhere; that share is measured before the attacks and must not grow.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....runtime.api.outputs import CompletionOutput
from ....runtime.api.sampling_params import SamplingParams
from ....runtime.client.client import Client
from ...bench.random_model import write_model, write_random_adapter, write_random_adapters
from ...options.engine import DEMO_MODEL, demo_prompts
from ...options.models import SHAPES

DEMO_FLAGS = ("--precision", "fp32", "--max-model-len", "256", "--num-kv-pages", "64", "--max-num-seqs", "8")
"""In fp32 on a CPU answers do not depend on the batch."""
HONEST_RANK = 4
MEASURED_TOKENS = 48
TIE = 0.25
"""Difference of two log-probabilities below which another batch's rounding may choose either token."""
LIKELIEST = 20
MORE_STRAYS = 0.1
"""Share of all answers that chance may add to those that stray."""
FEW = 8
"""Sizes of batches, between one request and all."""
ENOUGH = 100
"""Fewest answers for a share."""


@dataclass(frozen=True)
class Question:
    """A prompt for an adapter (None: the base model) and its answer.

    The answer is `text`, or the measured `tokens` with log-probabilities of the likeliest tokens at each.
    """

    prompt: str | tuple[int, ...]
    adapter: str | None
    text: str | None = None
    tokens: tuple[int, ...] = ()
    likeliest: tuple[Mapping[int, float], ...] = ()

    @property
    def asked(self) -> str | list[int]:
        """Return the prompt for clients."""
        return self.prompt if isinstance(self.prompt, str) else list(self.prompt)

    @property
    def params(self) -> SamplingParams:
        """Return greedy parameters."""
        if self.text is not None:
            return SamplingParams(temperature=0.0, max_tokens=48)
        return SamplingParams(temperature=0.0, max_tokens=MEASURED_TOKENS, ignore_eos=True)

    def judge(self, answer: CompletionOutput) -> str:
        """Return `right` or `wrong`; for a measured answer also `tied` or `strayed`, see `healthy`."""
        if self.text is not None:
            return "right" if answer.text.strip() == self.text else "wrong"
        said = answer.token_ids
        if len(said) != len(self.tokens):
            return "wrong"
        for token, expected, likely in zip(said, self.tokens, self.likeliest, strict=True):
            if token != expected:
                return "tied" if likely.get(token, float("-inf")) > max(likely.values()) - TIE else "strayed"
        return "right"


def known() -> list[Question]:
    """Return the questions of the demo model."""
    return [Question(str(entry["prompt"]), entry["adapter"], text=entry["answer"]) for entry in demo_prompts()]


def measured(client: Client, adapters: Sequence[str | None], source: random.Random) -> list[Question]:
    """Return two prompts for each adapter with the answers of the undisturbed server. Raises the client's errors."""
    prompts = [tuple(source.randrange(3, 250) for _ in range(length)) for length in (24, 90)]
    asked = [(prompt, adapter) for adapter in adapters for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=MEASURED_TOKENS, ignore_eos=True, logprobs=LIKELIEST)
    outputs = client.generate([list(prompt) for prompt, _ in asked], params, [adapter for _, adapter in asked])
    return [
        Question(
            prompt,
            adapter,
            tokens=tuple(output.outputs[0].token_ids),
            likeliest=tuple(
                {token: each.logprob for token, each in place.items()} for place in output.outputs[0].logprobs or ()
            ),
        )
        for (prompt, adapter), output in zip(asked, outputs, strict=True)
    ]


def undisturbed_strays(client: Client, questions: Sequence[Question], clients: int, source: random.Random) -> float:
    """Return the share of measured answers that stray without attacks, the largest over batch sizes.

    Sizes are one request, a few, and as many as there are `clients`. Raises the client's errors.
    """
    asked = [question for question in questions if question.tokens]

    def share(size: int) -> float:
        mixed, strayed = source.sample(asked, len(asked)), 0
        for group in (mixed[first : first + size] for first in range(0, len(mixed), size)):
            said = client.generate([each.asked for each in group], group[0].params, [each.adapter for each in group])
            judged = [each.judge(output.outputs[0]) for each, output in zip(group, said, strict=True)]
            strayed += judged.count("strayed")
        return strayed / len(asked)

    return max(share(size) for size in {1, min(FEW, clients), clients}) if asked else 0.0


def too_many_strays(seen: Mapping[str, int], usual: float) -> str | None:
    """Return a finding if more answers strayed than chance explains; `usual`: the share before the attacks."""
    strayed = seen.get("strayed", 0)
    answers = strayed + seen.get("right", 0) + seen.get("tied", 0)
    if not strayed or (usual and (answers < ENOUGH or strayed / answers <= usual + MORE_STRAYS)):
        return None
    return f"{strayed} of {answers} answers strayed; {usual:.1%} did before the attacks"


@dataclass(frozen=True)
class Subject:
    """A model: arguments of `sidestream serve`, names of random adapters, and the directory of a valid adapter."""

    arguments: list[str]
    random_adapters: list[str]
    honest_adapter: Path
    demo: bool

    def questions(self, client: Client, source: random.Random) -> list[Question]:
        """Return questions with answers; those of random weights are measured now."""
        found = known() if self.demo else measured(client, [None], source)
        return found + measured(client, self.random_adapters, source)


def prepare(folder: Path, shape: str | None, adapters: int, rank: int) -> Subject:
    """Write the model below `folder`: the demo model (`shape` None) or a random one, with random adapters."""
    if shape is None:
        config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
        written = write_random_adapters(folder, config, rank, adapters)
        arguments, honest = list(DEMO_FLAGS), DEMO_MODEL / "adapters" / "pirate"
    else:
        written = write_model(folder / "model", SHAPES[shape], adapters, rank)
        honest = Path(write_random_adapter(folder / "honest", SHAPES[shape], HONEST_RANK, adapters))
        arguments = [str(folder / "model"), "--load-format", "dummy"]
        if not adapters:
            arguments += ["--max-loras", "1", "--max-lora-rank", str(rank)]
    if written:
        arguments += ["--lora-modules", *(f"{name}={path}" for name, path in written.items())]
    return Subject(arguments, list(written), honest, demo=shape is None)
