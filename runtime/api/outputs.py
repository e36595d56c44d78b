"""Outputs of requests, with vLLM's names."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .lora_request import LoRARequest

if TYPE_CHECKING:  # clients start without numpy
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token.

    logprob         natural logarithm of the probability under the raw logits
    rank            1 = likeliest
    decoded_token   text of the token, U+FFFD for a part of a character; None without a tokenizer or with
                    detokenize=False
    token_bytes     the same as UTF-8; the bytes of an answer's tokens make up its text
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: bytes | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    text                new text without the prompt; '' without a tokenizer or with detokenize=False
    token_ids           all sampled tokens, including the one that ended it
    cumulative_logprob  sum of the sampled tokens' log-probabilities; None unless logprobs were requested
    logprobs            for each token a dict: the sampled token first, then the likeliest ones
    finish_reason       None while it runs, `stop`, `length`, `abort`, `timeout` (deadline passed) or `error`
    stop_reason         stop string or stop token id that ended it, None for end-of-sequence; for `timeout` and `error`
                        a message
    text_offsets        for each token of `logprobs` the character of `text` at which it begins; a token inside a
                        character has that character's offset
    seed                of its random numbers; None for answers of a server, and for several seeds (`Continuation`)
    versions            (first token, version) of each version of its adapter, if the adapter was updated with
                        inflight="switch" while it ran
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] | None = None
    seed: int | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, eq=False)
class ScoreOutput:
    """Log-probabilities of the tokens of one response.

    logprobs            [n] fp32: natural logarithms of the tokens' probabilities under the raw logits
    top_token_ids       [n, top] int32: the likeliest tokens at each position, the likeliest first
    top_logprobs        [n, top] fp32: their log-probabilities
    num_cached_tokens   number of prompt tokens found in the prefix cache
    adapter_active      False: the base model computed them, since the prompt lacks the aLoRA adapter's invocation
    """

    logprobs: "NDArray[np.float32]"
    top_token_ids: "NDArray[np.int32]"
    top_logprobs: "NDArray[np.float32]"
    num_cached_tokens: int = 0
    adapter_active: bool = True


@dataclass(frozen=True)
class RequestMetrics:
    """Times of arrival, first token (None: there was none), end, and of leaving the queue (None: unknown), in seconds
    since the epoch.
    """

    arrival_time: float
    first_token_time: float | None
    finished_time: float
    scheduled_time: float | None = None


@dataclass
class RequestOutput:
    """Output of one request: its prompt and n completions.

    adapter             name of the LoRA adapter; None: the base model
    num_cached_tokens   number of prompt tokens found in the prefix cache
    lora_request        the caller's LoRARequest, or None
    prompt_logprobs     None unless requested; else None for the first prompt token, and a dict for each other one: the
                        prompt's token first, then the likeliest ones
    num_draft_tokens, num_accepted_tokens   numbers of computed drafts, and of drafts that became output
    num_history_*       the same for drafts from earlier answers of the adapter
    num_trained_*       the same for drafts from a trained draft model
    num_preemptions     how often its completions were preempted
    adapter_active      False: the base model answered, since the prompt lacks the aLoRA adapter's invocation
    receipt             of a server's answer, if it was requested
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
    num_preemptions: int = 0
    adapter_active: bool = True
    receipt: dict[str, Any] | None = None
