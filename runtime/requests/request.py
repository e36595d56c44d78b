"""What is asked of the engine, and what one step adds to an answer."""

from dataclasses import dataclass

from .outputs import FinishReason, Logprob
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class Request:
    """What is asked: already tokenized and checked.

    `priority`: lower is served sooner; `timeout`: seconds after which it ends as it is;
    `owner`: whose it is, such as a client's connection: steps are shared fairly between owners.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    adapter: str | None = None
    priority: int = 0
    timeout: float | None = None
    owner: str = ""


@dataclass(slots=True)
class Delta:
    """What one step added to one completion."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: dict[int, Logprob] | None = None
