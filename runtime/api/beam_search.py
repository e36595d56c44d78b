"""Beam search: parameters and outputs of `LLM.beam_search`, with vLLM's names, and the choice of continuations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from .checks import make_plain
from .errors import RequestError
from .lora_request import LoRARequest
from .outputs import FinishReason, Logprob
from .sampling_params import DEFAULT_MAX_LOGPROBS, SamplingParams

MAX_BEAM_WIDTH = DEFAULT_MAX_LOGPROBS // 2


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search; checked on construction.

    beam_width       number of continuations to keep and return
    max_tokens       maximum number of tokens of each continuation
    ignore_eos       continue after an end of sequence
    temperature      above 0: also extend each continuation by one sampled token, in addition to the likeliest ones
    length_penalty   rank by cum_logprob / length ** length_penalty, with the length of the continuation and its end of
                     sequence, as in vLLM 0.33 and transformers
    include_stop_str_in_output   show special tokens, such as an end of sequence, in `text`
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        width, penalty = self.beam_width, self.length_penalty
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_BEAM_WIDTH:
            raise RequestError(f"beam_width={width!r} must be an integer from 1 to {MAX_BEAM_WIDTH}")
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not math.isfinite(penalty):
            raise RequestError(f"length_penalty={penalty!r} must be a number; 0 ranks by cum_logprob alone")
        if self.max_tokens is None:
            raise RequestError("max_tokens=None must be an integer; a beam search needs a limit")
        _ = self.sampling  # checks the other fields

    @property
    def sampling(self) -> SamplingParams:
        """Parameters of a single step, with the candidates as log-probabilities."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=2 * self.beam_width,
        )


@dataclass
class BeamSearchSequence:
    """One continuation.

    tokens         token ids of prompt and answer, including an end of sequence
    cum_logprob    sum of the answer's log-probabilities under the raw logits
    text           text of prompt and answer; None without a tokenizer
    logprobs       candidates of each answer token
    finish_reason  `stop` (end of sequence, with its id as `stop_reason`) or `length`
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None


@dataclass
class BeamSearchOutput:
    """Continuations of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """Search of one prompt. `beams`: open continuations; none once they cannot beat the complete ones.

    prompt   the first tokens of each continuation
    """

    def __init__(self, prompt: list[int], params: BeamSearchParams, eos_ids: frozenset[int]) -> None:
        self.beams = [BeamSearchSequence(list(prompt))]
        self._complete: list[BeamSearchSequence] = []
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids

    def extend(self, candidates: Sequence[Mapping[int, Any]]) -> None:
        """Extend each beam by one of its candidates: token id -> an object with its `logprob`."""
        if not self.beams:
            return
        width = self._params.beam_width
        extensions = [
            (beam.cum_logprob + entry.logprob, token, beam, entries)
            for beam, entries in zip(self.beams, candidates, strict=True)
            for token, entry in entries.items()
        ]
        unfinished = [each for each in extensions if each[1] not in self._eos_ids]
        self.beams = [_extended(*each) for each in nlargest(width, unfinished, key=lambda each: each[0])]
        for each in extensions:
            if each[1] in self._eos_ids:
                ended = _extended(*each)
                ended.finish_reason, ended.stop_reason = "stop", ended.tokens[-1]
                self._complete.append(ended)
        self._complete = nlargest(width, self._complete, key=self._score)
        bound = max(map(self._score_bound, self.beams), default=0.0)
        if len(self._complete) == width and self._score(self._complete[-1]) >= bound:
            self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """Return the best continuations, best first."""
        for beam in self.beams:
            beam.finish_reason = "length"
        return nlargest(self._params.beam_width, self._complete + self.beams, key=self._score)

    def _score(self, sequence: BeamSearchSequence) -> float:
        return float(sequence.cum_logprob / len(sequence.logprobs) ** self._params.length_penalty)

    def _score_bound(self, beam: BeamSearchSequence) -> float:
        """Return an upper bound of the scores of a beam's continuations.

        They are at most as likely as the beam. With a penalty above 0 the longest one has the highest score.
        """
        penalty = self._params.length_penalty
        length = self._params.max_tokens if penalty > 0 else len(beam.logprobs)
        return float(beam.cum_logprob / length**penalty)


def _extended(total: float, token: int, beam: BeamSearchSequence, entries: Any) -> BeamSearchSequence:
    return BeamSearchSequence([*beam.tokens, token], total, logprobs=[*beam.logprobs, entries])
