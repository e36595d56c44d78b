"""What is asked of `LLM.beam_search`, and what it gives, with vLLM's names."""

import math
from dataclasses import dataclass, field

from .checks import make_plain
from .errors import RequestError
from .lora_request import LoRARequest
from .outputs import FinishReason, Logprob
from .sampling_params import MAX_LOGPROBS, SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """How the likeliest continuations of a prompt are looked for; checked on construction.

    beam_width       how many are followed, and given back
    max_tokens       most tokens of each
    ignore_eos       go on after an end of sequence
    temperature      above 0 one drawn token joins the likeliest ones that each continuation is extended by
    length_penalty   continuations are ranked by cum_logprob / length ** length_penalty; prompt and answer count, an
                     end of sequence does not, as in vLLM
    include_stop_str_in_output   `text` shows special tokens, such as an end of sequence
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
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_LOGPROBS // 2:
            raise RequestError(f"beam_width={width!r} must be an integer from 1 to {MAX_LOGPROBS // 2}")
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not math.isfinite(penalty):
            raise RequestError(f"length_penalty={penalty!r} must be a number; 0 ranks by cum_logprob alone")
        if self.max_tokens is None:
            raise RequestError("max_tokens=None must be an integer; a beam search has a last step")
        _ = self.sampling  # checks the other fields

    @property
    def sampling(self) -> SamplingParams:
        """How one token is asked for, with the candidates that it is chosen among."""
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

    tokens         the prompt's token ids and the answer's, an end of sequence included
    cum_logprob    sum over the answer's tokens of the logarithm of their probability under the raw logits
    text           all tokens as text, the prompt included; None without a tokenizer
    logprobs       for each token of the answer the candidates that there were
    finish_reason  `stop` (end of sequence, whose id is `stop_reason`) or `length`
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
    """What was found for one prompt, best first."""

    sequences: list[BeamSearchSequence]
