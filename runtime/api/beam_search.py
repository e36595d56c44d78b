"""Parameters and outputs of `LLM.beam_search`, with vLLM's names."""

import math
from dataclasses import dataclass, field

from .checks import make_plain
from .errors import RequestError
from .lora_request import LoRARequest
from .outputs import FinishReason, Logprob
from .sampling_params import DEFAULT_MAX_LOGPROBS, SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search; checked on construction.

    beam_width       number of continuations to keep and return
    max_tokens       maximum number of tokens of each continuation
    ignore_eos       continue after an end of sequence
    temperature      above 0: also extend each continuation by one sampled token, in addition to the likeliest ones
    length_penalty   rank by cum_logprob / length ** length_penalty; as in vLLM length includes the prompt but not an
                     end of sequence
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
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= DEFAULT_MAX_LOGPROBS // 2:
            raise RequestError(f"beam_width={width!r} must be an integer from 1 to {DEFAULT_MAX_LOGPROBS // 2}")
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
