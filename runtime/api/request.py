"""What is asked of the engine, and what one step adds to an answer."""

from dataclasses import dataclass
from typing import Any, Protocol

from .outputs import FinishReason, Logprob
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class Continuation:
    """What an earlier engine made of one completion, for one that goes on with it.

    `token_ids`: its tokens so far; `characters`: how much of their text the caller has (Unicode code points);
    `finished`: it is complete.
    """

    token_ids: list[int]
    characters: int = 0
    finished: bool = False


class Constraint(Protocol):
    """A compiled `StructuredOutputsParams` (`structured.matcher.Grammar`)."""

    def matcher(self) -> Any:
        """What follows one completion."""
        ...


@dataclass(frozen=True)
class Request:
    """What is asked: already tokenized and checked.

    `priority`: lower is served sooner; `timeout`: seconds after which it ends as it is;
    `owner`: whose it is, such as a client's connection: steps are shared fairly between owners;
    `continues`: what there is of each of its completions already, or nothing;
    `bad_words`: token sequences that its output must not hold; `grammar`: what its output must look like, compiled.
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


@dataclass(slots=True)
class Delta:
    """What one step added to one completion.

    `text_offset`: where in the completion's text the token of `logprobs` begins.
    `prompt_logprobs`: of the next tokens of the prompt, beginning with its second one. They come before the first
    token, also for requests that do not stream, and with nothing else.
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
