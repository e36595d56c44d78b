"""From logits to tokens on the device: penalties and biases, sampling, log-probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ...ops.core.triton_support import cdiv
from ...ops.elementwise.argmax import argmax
from ...ops.elementwise.sample import sample, top_logprobs
from ..scheduler.step_plan import Int32, SamplingPlan, StepMasks, StepPlan
from .inputs.staging import Staging

NUMBERS = (
    ("temperature", torch.float32),
    ("top_p", torch.float32),
    ("min_p", torch.float32),
    ("top_k", torch.int32),
    ("seeds", torch.int64),
    ("steps", torch.int64),
)


ROWS_AT_ONCE = 32
Reported = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DeviceSamples:
    """Tokens [B] int32 of a step, on the device (-1: no token, see `Sampler`); with logprobs: ids and values [B, 1 + k]
    and the chosen token's rank [B]; `prompt_*`: the same for prompt tokens that were scored.
    """

    tokens: torch.Tensor
    logprob_tokens: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    prompt_tokens: torch.Tensor | None = None
    prompt_logprobs: torch.Tensor | None = None
    prompt_ranks: torch.Tensor | None = None


def is_plain(sampling: SamplingPlan) -> bool:
    """Whether a step's tokens are taken from its logits as they are, and nothing else is asked."""
    edits = len(sampling.history_rows), len(sampling.bias_rows), len(sampling.allowed_rows)
    return sampling.num_logprobs < 0 and sampling.num_prompt_logprobs < 0 and not any(edits)


class Sampler:
    """Samples steps of at most `max_rows` rows of logits.

    A step of greedy rows is one argmax; everything else is done only when a row asks for it. A row whose largest logit
    is infinite, or with NaN among them, gets no token (-1).
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.device = device
        self._max_rows = max_rows
        self._masks: Staging | None = None
        self._numbers = Staging([(name, (max_rows,), dtype) for name, dtype in NUMBERS], device)

    def __call__(
        self,
        logits: torch.Tensor,
        plan: StepPlan,
        masks: StepMasks | None = None,
        positions: torch.Tensor | None = None,
    ) -> DeviceSamples:
        """logits [R, V] of the plan's sequences, in order (rows that sample nothing are computed along), then of other
        prompt tokens that are scored. `masks`: which tokens some of them may get. `positions` [R] int32: what the
        noise's steps are relative to.
        """
        prompts = None if plan.sampling.num_prompt_logprobs < 0 else self._score(logits, plan)
        sampling = plan.sampling
        logits = logits[: len(sampling.temperature)]
        scores = logits
        if len(sampling.history_rows) or len(sampling.bias_rows) or len(sampling.allowed_rows):
            scores = edited_logits(logits, sampling)
        masked = () if masks is None or not len(masks.rows) else self._upload(masks, plan.first_logits, *logits.shape)
        tokens = argmax(scores, *masked) if sampling.greedy else self._draw(scores, sampling, masked, positions)
        if sampling.num_logprobs < 0:
            return DeviceSamples(tokens, None, None, None, *(prompts or ()))
        chosen = _reported(logits, tokens.clamp_min(0), sampling.num_logprobs)
        return DeviceSamples(tokens, *chosen, *(prompts or ()))

    def warm_up(self, logits: torch.Tensor) -> None:
        """Launch every kernel that samples rows of logits [R, V] such as these, masked or not. What comes out means
        nothing.
        """
        numbers = {name: self._numbers.device[name][:1] for name, _ in NUMBERS}
        row = torch.zeros(1, dtype=torch.int32, device=logits.device)
        words = torch.zeros(1, cdiv(logits.shape[1], 32), dtype=torch.int32, device=logits.device)
        for scores in (logits[:1], logits[:1].float()):  # those that were edited are in fp32
            for masked in ((), (words, row)):
                argmax(scores, *masked)
                drawn_with(scores, numbers, *masked)

    def _score(self, logits: torch.Tensor, plan: StepPlan) -> Reported:
        """The log-probabilities of prompts, some rows at a time: each takes several times its logits' memory."""
        rows = torch.from_numpy(plan.scored_rows.astype(np.int64)).to(logits.device)
        tokens = torch.from_numpy(plan.scored_tokens.astype(np.int32)).to(logits.device)
        parts = [
            _reported(logits[some], wanted, plan.sampling.num_prompt_logprobs)
            for some, wanted in zip(rows.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE), strict=True)
        ]
        ids, logprobs, ranks = (torch.cat(part) for part in zip(*parts, strict=True))
        return ids, logprobs, ranks

    def _upload(self, masks: StepMasks, first: Int32, rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The masks, and which of them holds for a row (-1: none), on the device."""
        if self._masks is None:
            sizes = {"mask_rows": (self._max_rows,), "masks": (self._max_rows, cdiv(vocabulary, 32))}
            self._masks = Staging([(name, shape, torch.int32) for name, shape in sizes.items()], self.device)
        host, count = self._masks.host, len(masks.rows)
        host["masks"][:count] = masks.words
        host["mask_rows"][:rows] = -1
        host["mask_rows"][first[masks.rows] + masks.places] = np.arange(count)
        self._masks.upload(count)
        return self._masks.device["masks"][:count], self._masks.device["mask_rows"][:rows]

    def _draw(
        self,
        scores: torch.Tensor,
        sampling: SamplingPlan,
        masked: tuple[torch.Tensor, ...],
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        return drawn_with(scores, self.numbers(sampling, positions), *masked)

    def numbers(self, sampling: SamplingPlan, positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The plan's temperature, top_k, top_p, min_p, seeds and steps, [R] each, on the device."""
        rows = len(sampling.temperature)
        for name, _ in NUMBERS:
            self._numbers.host[name][:rows] = getattr(sampling, name)
        self._numbers.upload()
        numbers = {name: self._numbers.device[name][:rows] for name, _ in NUMBERS}
        if positions is not None:
            numbers["steps"] = numbers["steps"] + positions[:rows]
        return numbers


def drawn_with(scores: torch.Tensor, numbers: Mapping[str, torch.Tensor], *masked: torch.Tensor) -> torch.Tensor:
    """The tokens [R] that `sample` draws from scores [R, V] with `Sampler.numbers`."""
    return sample(
        scores,
        numbers["temperature"],
        numbers["top_k"],
        numbers["top_p"],
        numbers["min_p"],
        numbers["seeds"],
        numbers["steps"],
        *masked,
    )


def _reported(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Reported:
    """Ids and log-probabilities [N, 1 + count] of the tokens [N] and of the likeliest ones; the tokens' ranks [N]."""
    top = top_logprobs(logits, tokens, count)
    return (
        torch.cat((tokens.unsqueeze(1), top.ids.to(torch.int32)), dim=1),
        torch.cat((top.token_logprob.unsqueeze(1), top.logprobs), dim=1),
        top.token_rank.to(torch.int32),
    )


def edited_logits(logits: torch.Tensor, sampling: SamplingPlan) -> torch.Tensor:
    """fp32 logits [B, V] with penalties and biases, as vLLM defines them (repetition first, then frequency and
    presence, then biases); -inf for tokens that are not allowed.
    """
    edited = logits.float().clone()

    def on_device(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(logits.device, dtype)

    if len(sampling.history_rows):
        rows, tokens = on_device(sampling.history_rows, torch.int64), on_device(sampling.history_tokens, torch.int64)
        counts = on_device(sampling.history_counts, torch.float32)
        repetition = on_device(sampling.repetition_penalty, torch.float32)[rows]
        values = edited[rows, tokens]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - on_device(sampling.frequency_penalty, torch.float32)[rows] * counts
        edited[rows, tokens] = values - on_device(sampling.presence_penalty, torch.float32)[rows] * (counts > 0)
    if len(sampling.bias_rows):
        rows, tokens = on_device(sampling.bias_rows, torch.int64), on_device(sampling.bias_tokens, torch.int64)
        edited[rows, tokens] += on_device(sampling.bias_values, torch.float32)
    if len(sampling.allowed_rows):
        rows, tokens = on_device(sampling.allowed_rows, torch.int64), on_device(sampling.allowed_tokens, torch.int64)
        allowed = edited[rows, tokens]
        edited[on_device(np.unique(sampling.allowed_rows), torch.int64)] = -torch.inf
        edited[rows, tokens] = allowed
    return edited
