"""Training data of a draft: the target's own answers, and its probabilities of each token."""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..bench.drafts.questions import questions
from ..train.adapter_training import PeftModel
from .head import Batch

PROMPT_WEIGHT = 0.2
"""Weight of a prompt's rows in the loss."""


@dataclass(frozen=True)
class Answer:
    """A prompt with its answer, which starts at `begin`."""

    tokens: list[int]
    begin: int


def own_answers(
    model: Path, adapters: dict[str, str], count: int, max_tokens: int, prompts: Path | None, seed: int, **engine: Any
) -> dict[str | None, list[Answer]]:
    """Return own answers to `count` questions of each adapter's tasks (None: the base model's), half of them greedy."""
    from ....runtime.api.sampling_params import SamplingParams
    from ....runtime.llm import LLM

    found: dict[str | None, list[Answer]] = {}
    more: dict[str, Any] = {"max_loras": len(adapters)} if adapters else {}
    with LLM(str(model), adapters, show_progress=False, seed=seed, **more, **engine) as llm:
        for load in questions(model, llm.get_tokenizer(), list(adapters), count, prompts, "train"):
            params = [
                SamplingParams(temperature=0.0 if place % 2 else 0.7, seed=seed + place, max_tokens=max_tokens)
                for place in range(len(load.prompts))
            ]
            outputs = llm.generate(load.prompts, params, adapter=load.adapter, use_tqdm=False)
            found.setdefault(load.adapter, []).extend(
                Answer([*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids))
                for output in outputs
                if len(output.outputs[0].token_ids) > 1
            )
    return found


def drafted_vocabulary(answers: Sequence[Answer], most: int, vocabulary: int) -> torch.Tensor:
    """Return the tokens that a head drafts, ascending: all, or the `most` frequent ones."""
    if most >= vocabulary:
        return torch.arange(vocabulary)
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for answer in answers:
        counts += torch.bincount(torch.tensor(answer.tokens[answer.begin :]), minlength=vocabulary) * 8
        counts += torch.bincount(torch.tensor(answer.tokens[: answer.begin]), minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:most].sort().values


class Target:
    """The model with its adapters in transformers, which the head learns from.

    layers      numbers of layers after which hidden states are taken
    vocabulary  of the head
    """

    def __init__(
        self,
        model: Path,
        adapters: dict[str, str],
        layers: Sequence[int],
        vocabulary: torch.Tensor,
        device: torch.device,
    ) -> None:
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        base: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype).to(device)
        self.state: dict[str, torch.Tensor] = dict(base.state_dict())
        self._model = base
        for name, path in adapters.items():
            if self._model is base:
                self._model = PeftModel.from_pretrained(base, path, adapter_name=name)
            else:
                self._model.load_adapter(path, adapter_name=name)
        self._model.eval()
        self._layers, self._vocabulary, self._device = layers, vocabulary.to(device), device

    @torch.no_grad()
    def batch(self, answers: Sequence[Answer], adapter: str | None, longest: int) -> Batch:
        """Return the target's batch for these answers of an adapter; the last `longest` tokens of each."""
        width = max(len(answer.tokens) for answer in answers)
        tokens = torch.zeros(len(answers), width, dtype=torch.int64)
        weights = torch.zeros(len(answers), width - 2)
        for row, answer in enumerate(answers):
            tokens[row, : len(answer.tokens)] = torch.tensor(answer.tokens)
            weights[row, : len(answer.tokens) - 2] = PROMPT_WEIGHT
            weights[row, answer.begin - 2 : len(answer.tokens) - 2] = 1.0
        tokens, weights = tokens.to(self._device), weights.to(self._device)
        if adapter is not None:
            self._model.set_adapter(adapter)
        alone = adapter is None and isinstance(self._model, PeftModel)
        with self._model.disable_adapter() if alone else nullcontext():
            said = self._model(input_ids=tokens[:, :-1], use_cache=False, output_hidden_states=True)
        first = max(0, width - 1 - longest)
        features = torch.cat([said.hidden_states[layer][:, first:-1] for layer in self._layers], dim=-1)
        wanted = said.logits[:, first + 1 :].float()[..., self._vocabulary].log_softmax(-1)
        return Batch(tokens[:, first:-1], features, wanted, weights[:, first:], first)

    def batches(self, answers: dict[str | None, list[Answer]], rows: int, longest: int, seed: int) -> Iterator[Batch]:
        """Yield batches of one adapter each, in proportion to their answers; answers of similar lengths together."""
        dice = random.Random(seed)
        while True:
            groups: list[tuple[str | None, list[Answer]]] = []
            for adapter, mine in answers.items():
                order = sorted(mine, key=lambda answer: len(answer.tokens) + 8 * dice.random())
                groups += [(adapter, order[first : first + rows]) for first in range(0, len(order), rows)]
            dice.shuffle(groups)
            for adapter, some in groups:
                yield self.batch(some, adapter, longest)
