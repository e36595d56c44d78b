"""What a caller gets back, shaped as vLLM's outputs."""

from dataclasses import dataclass, field
from typing import Literal

from .lora_request import LoRARequest

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability under the raw logits, and the token's rank among them (1 =
    likeliest).

    decoded_token   what the token adds to a text, U+FFFD for a part of a character; None without a tokenizer or with
                    detokenize=False
    token_bytes     the same as UTF-8: the bytes of an answer's tokens are those of its text
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: bytes | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    text                the new text only; '' without a tokenizer or with detokenize=False
    token_ids           every sampled token, the ending one included
    cumulative_logprob  sum over the chosen tokens; None unless logprobs were asked for
    logprobs            for each token a dict: the chosen token first, then the likeliest ones
    text_offsets        for each token of `logprobs` the character of `text` at which it begins; that of the whole
                        character for a token that begins inside one
    finish_reason       None while it runs; `stop`, `length`, `abort`, `timeout` (its deadline passed) or `error` (it
                        could not be served)
    stop_reason         the stop string or stop token id that ended it, None for end-of-sequence; what happened, for
                        `timeout` and `error`
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] | None = None

    @property
    def finished(self) -> bool:
        """Whether no more tokens will follow."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """When a request came, got its first token (None: it got none) and ended; seconds since the epoch."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float


@dataclass
class RequestOutput:
    """One request's prompt and its n completions; `adapter` is the LoRA adapter's name or None for the base model.

    num_cached_tokens   how many tokens of the prompt were found in the prefix cache
    num_draft_tokens    drafts that were computed for its completions, and num_accepted_tokens: those that became output
    num_history_draft_tokens, num_history_accepted_tokens   of both those that came from former answers of its adapter
    num_trained_draft_tokens, num_trained_accepted_tokens   of both those that a trained draft made
    metrics             when it came and ended
    lora_request        what the caller gave as such, or None
    prompt_logprobs     None unless they were asked for; else None for the prompt's first token, and for each other a
                        dict: the prompt's own token first, then the likeliest ones
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    adapter: str | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_history_draft_tokens: int = 0
    num_history_accepted_tokens: int = 0
    num_trained_draft_tokens: int = 0
    num_trained_accepted_tokens: int = 0
