"""Sample tokens from logits on the device: penalties and biases, masks, sampling, log-probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ...ops.core.triton_support import cdiv
from ...ops.elementwise.argmax import argmax
from ...ops.elementwise.sample import filtered_logits, sample, top_logprobs
from ...ops.elementwise.token_masks import masked_logits
from ..scheduler.step_plan import Int32, SamplingPlan, StepMasks, StepPlan
from .staging import Staging

PARAMETERS = (  # in the order of `sample`'s arguments
    ("temperature", torch.float32),
    ("top_k", torch.int32),
    ("top_p", torch.float32),
    ("min_p", torch.float32),
    ("seeds", torch.int64),
    ("steps", torch.int64),
)
SCORED_TOGETHER = 32  # rows: each takes several times its logits' memory
Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DeviceSamples:
    """Samples of a step on the device: tokens [B] int32 (-1: see `Sampler`); with logprobs token ids and values
    [B, 1 + k] and the chosen token's rank [B]; `prompt_*`: the same for scored prompt tokens.
    """

    tokens: torch.Tensor
    logprob_tokens: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    prompt_tokens: torch.Tensor | None = None
    prompt_logprobs: torch.Tensor | None = None
    prompt_ranks: torch.Tensor | None = None


def edits_logits(sampling: SamplingPlan) -> bool:
    """Return whether a row has penalties, biases or allowed tokens."""
    return any((len(sampling.history_rows), len(sampling.bias_rows), len(sampling.allowed_rows)))


def needs_logprobs(sampling: SamplingPlan) -> bool:
    """Return whether log-probabilities of output or prompt tokens are requested."""
    return sampling.num_logprobs >= 0 or sampling.num_prompt_logprobs >= 0


class Sampler:
    """Samples steps of at most `max_rows` rows of logits.

    A greedy step is one argmax; all else is done only if a row needs it. A row gets no token (-1) if its largest logit
    is infinite or a logit is NaN.

    processed   log-probabilities of sampled tokens are those after edits, masks, temperature and filters
    exact       give a row the same token and log-probabilities whatever other rows there are
    """

    def __init__(self, max_rows: int, device: torch.device, processed: bool = False, exact: bool = False) -> None:
        self.device = device
        self._processed, self._exact = processed, exact
        self._max_rows = max_rows
        self._masks: Staging | None = None
        self._parameters = Staging([(name, (max_rows,), dtype) for name, dtype in PARAMETERS], device)

    def __call__(
        self,
        logits: torch.Tensor,
        plan: StepPlan,
        masks: StepMasks | None = None,
        positions: torch.Tensor | None = None,
    ) -> DeviceSamples:
        """Sample a step.

        logits     [R, V]: rows of the plan's sequences in order (also those that sample nothing), then of scored prompt
                   tokens
        masks      allowed tokens of some rows
        positions  [R] int32, added to the plan's `steps` for the random numbers
        """
        prompts = None if plan.sampling.num_prompt_logprobs < 0 else self._score_prompts(logits, plan)
        sampling = plan.sampling
        logits = logits[: len(sampling.temperature)]
        scores = edited_logits(logits, sampling) if edits_logits(sampling) else logits
        masked = () if masks is None or not len(masks.rows) else self._upload(masks, plan.first_logits, *logits.shape)
        processes = self._processed and sampling.num_logprobs >= 0
        parameters = {} if sampling.greedy and not processes else self.parameters(sampling, positions)
        if sampling.greedy:
            tokens = argmax(scores, *masked)
        else:
            if self._exact and not masked:  # kernels with masks add the probabilities of top_p in another order
                masked = _no_masks(logits)
            tokens = draw(scores, parameters, *masked)
        if sampling.num_logprobs < 0:
            return DeviceSamples(tokens, None, None, None, *(prompts or ()))
        if processes:
            logits = _processed_logits(scores, parameters, tokens.clamp_min(0), *masked)
        chosen = _logprobs(self._aligned(logits), tokens.clamp_min(0), sampling.num_logprobs)
        if len(sampling.reported_rows):
            _report(logits, chosen, sampling)
        return DeviceSamples(tokens, *chosen, *(prompts or ()))

    def warm_up(self, logits: torch.Tensor) -> None:
        """Launch every sampling kernel for logits [R, V] like these; the result is undefined."""
        parameters = {name: self._parameters.device[name][:1] for name, _ in PARAMETERS}
        for scores in (logits[:1], logits[:1].float()):  # edited logits are fp32
            for masked in ((), _no_masks(logits[:1])):
                argmax(scores, *masked)
                draw(scores, parameters, *masked)

    def parameters(self, sampling: SamplingPlan, positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return PARAMETERS of the plan, [R] each, on the device."""
        rows = len(sampling.temperature)
        for name, _ in PARAMETERS:
            self._parameters.host[name][:rows] = getattr(sampling, name)
        self._parameters.upload()
        parameters = {name: self._parameters.device[name][:rows] for name, _ in PARAMETERS}
        if positions is not None:
            parameters["steps"] = parameters["steps"] + positions[:rows]
        return parameters

    def _aligned(self, logits: torch.Tensor) -> torch.Tensor:
        """Pad logits [R, V] so that all rows begin at 16 bytes in fp32, if `exact`: a sum's order depends on that."""
        missing = -logits.shape[1] % 4 if self._exact else 0
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _score_prompts(self, logits: torch.Tensor, plan: StepPlan) -> Logprobs:
        rows = torch.from_numpy(plan.scored_rows.astype(np.int64)).to(logits.device)
        tokens = torch.from_numpy(plan.scored_tokens.astype(np.int32)).to(logits.device)
        parts = [
            _logprobs(self._aligned(logits[some]), scored, plan.sampling.num_prompt_logprobs)
            for some, scored in zip(rows.split(SCORED_TOGETHER), tokens.split(SCORED_TOGETHER), strict=True)
        ]
        ids, logprobs, ranks = (torch.cat(part) for part in zip(*parts, strict=True))
        return ids, logprobs, ranks

    def _upload(self, masks: StepMasks, first: Int32, rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the masks and each row's index into them (-1: none), on the device."""
        if self._masks is None:
            sizes = {"mask_rows": (self._max_rows,), "masks": (self._max_rows, cdiv(vocabulary, 32))}
            self._masks = Staging([(name, shape, torch.int32) for name, shape in sizes.items()], self.device)
        host, count = self._masks.host, len(masks.rows)
        host["masks"][:count] = masks.words
        host["mask_rows"][:rows] = -1
        host["mask_rows"][first[masks.rows] + masks.places] = np.arange(count)
        self._masks.upload(count)
        return self._masks.device["masks"][:count], self._masks.device["mask_rows"][:rows]


def _no_masks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks that leave every row of logits [R, V] as it is."""
    rows, vocabulary = logits.shape
    words = torch.zeros(1, cdiv(vocabulary, 32), dtype=torch.int32, device=logits.device)
    return words, torch.full((rows,), -1, dtype=torch.int32, device=logits.device)


def draw(scores: torch.Tensor, parameters: Mapping[str, torch.Tensor], *masked: torch.Tensor) -> torch.Tensor:
    """Draw tokens [R] from scores [R, V] with `Sampler.parameters`."""
    return sample(scores, *(parameters[name] for name, _ in PARAMETERS), *masked)


def _processed_logits(
    scores: torch.Tensor, parameters: Mapping[str, torch.Tensor], tokens: torch.Tensor, *masked: torch.Tensor
) -> torch.Tensor:
    """Return the fp32 logits [R, V] that tokens [R] were sampled from."""
    filters = [parameters[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    allowed = masked_logits(scores, *masked) if masked else scores
    columns = [allowed, *filters, tokens]
    parts = zip(*(column.split(SCORED_TOGETHER) for column in columns), strict=True)
    return torch.cat([filtered_logits(*part) for part in parts])


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Logprobs:
    """Return ids, log-probabilities [N, 1 + count] of the tokens and the likeliest, and the tokens' ranks [N]."""
    top = top_logprobs(logits, tokens, count)
    return (
        torch.cat((tokens.unsqueeze(1), top.ids.to(torch.int32)), dim=1),
        torch.cat((top.token_logprob.unsqueeze(1), top.logprobs), dim=1),
        top.token_rank.to(torch.int32),
    )


def _report(logits: torch.Tensor, found: Logprobs, sampling: SamplingPlan) -> None:
    """Replace the likeliest tokens in the result of `_logprobs` by those that their requests name."""
    ids, logprobs, _ = found
    places = np.stack([sampling.reported_rows, sampling.reported_columns, sampling.reported_tokens]).astype(np.int64)
    rows, columns, tokens = torch.from_numpy(places).to(logits.device)
    difference = logits[rows, tokens].float() - logits[rows, ids[rows, 0].long()].float()
    logprobs[rows, columns] = difference + logprobs[rows, 0]
    ids[rows, columns] = tokens.to(torch.int32)


def edited_logits(logits: torch.Tensor, sampling: SamplingPlan) -> torch.Tensor:
    """Return fp32 logits [B, V] with penalties and biases in vLLM's order: repetition, frequency, presence, biases;
    -inf for tokens that are not allowed.
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
