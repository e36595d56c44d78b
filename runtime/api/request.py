"""A request to the engine, and the output of one step for it."""

from dataclasses import dataclass
from typing import Any, Protocol

from .outputs import FinishReason, Logprob
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class Continuation:
    """Output of an earlier engine for one completion, to be continued.

    characters  length of the text that the caller has received, in Unicode code points
    finished    the completion has ended
    """

    token_ids: list[int]
    characters: int = 0
    finished: bool = False


class Constraint(Protocol):
    """A compiled `StructuredOutputsParams` (`structured.matcher.Grammar`)."""

    def matcher(self) -> Any:
        """Return the state for one completion."""


@dataclass(frozen=True)
class PageOffer:
    """KV pages of the beginning of a prompt in memory of another engine on this host.

    source         name of the memory
    places         place of each page in it, in the order of the prompt
    cached_tokens  tokens in these pages that the other engine had before the request
    """

    source: str
    places: tuple[int, ...]
    cached_tokens: int = 0


@dataclass(frozen=True)
class Request:
    """A tokenized and checked request.

    priority   lower is served sooner
    timeout    seconds after which it ends unfinished
    owner      such as a client's connection; steps are shared fairly between owners
    continues  earlier output of each completion, or ()
    bad_words  token sequences that the output must not hold
    grammar    compiled constraint on the output
    given      number of prompt tokens that are the caller's, in which an aLoRA's invocation is searched; None: all
    scored     (begin, end) of prompt tokens that earlier answers sampled: `prompt_logprobs` are of these only. (): all
    offer      pages of the prompt that another engine has computed, or None
    prefill_only  it is over after its first token; its pages are held for another engine
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    adapter: str | None = None
    priority: int = 0
    timeout: float | None = None
    owner: str = ""
    continues: tuple[Continuation, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Constraint | None = None
    given: int | None = None
    scored: tuple[tuple[int, int], ...] = ()
    offer: PageOffer | None = None
    prefill_only: bool = False


@dataclass(slots=True)
class Delta:
    """New output of one completion from one step.

    text_offset      character of the completion's text at which the token of `logprobs` begins
    prompt_logprobs  of the next prompt tokens, from the second one on; sent before the first token without other
                     fields, also for requests that do not stream
    versions         with the finish_reason: see CompletionOutput
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: dict[int, Logprob] | None = None
    text_offset: int = 0
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    versions: list[tuple[int, int]] | None = None
