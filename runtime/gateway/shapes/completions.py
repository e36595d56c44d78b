"""/v1/completions."""

from dataclasses import replace
from typing import Annotated, Literal, cast

from msgspec import Meta

from ...api.sampling_defaults import SamplingDefaults
from ...api.sampling_params import SamplingParams
from ...protocol.messages import MAX_PROMPT_TOKENS
from ..contracts import GatewayError
from .common import MAX_PROMPTS, Answer, Refused, Text, TokenId, TokenIds, Usage
from .logprobs import CompletionLogprobs, PromptLogprobs
from .sampling import LogprobCount, SamplingBody, refuse, sampling_params

DEFAULT_MAX_TOKENS = 16
Prompt = str | list[int]


class CompletionRequest(SamplingBody, frozen=True, kw_only=True):
    """One prompt or several: texts or lists of token ids."""

    prompt: Annotated[
        Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)],
        Meta(description="a text, a list of token ids, or a list of texts or of such lists"),
    ]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: LogprobCount | None = None
    suffix: Refused = None
    use_beam_search: Refused = None
    add_special_tokens: Annotated[bool, Meta(description="true only")] | None = None

    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or ids. Raises GatewayError 400 for a list of several kinds, or too long a one."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if set(map(type, given)) == {int}:
            return [cast(list[int], given)]
        if len(given) > MAX_PROMPTS:
            raise GatewayError(
                400, f"prompt has {len(given)} entries; at most {MAX_PROMPTS} are allowed", param="prompt"
            )
        made: list[Prompt] = [entry for entry in given if not isinstance(entry, int)]
        if len(made) < len(given) or len({type(entry) for entry in made}) > 1:
            raise GatewayError(400, "prompt mixes texts, token ids and lists of them; give one kind", param="prompt")
        return made

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """How tokens are drawn; `defaults`: the model's. Raises GatewayError 400 that names the field."""
        refuse("suffix", self.suffix)
        refuse("use_beam_search", self.use_beam_search)
        if self.best_of not in (None, self.n or 1):
            raise GatewayError(400, "best_of is not supported; use n and choose among its answers", param="best_of")
        if self.add_special_tokens is False:
            raise GatewayError(
                400, "add_special_tokens=false is not supported; send token ids as prompt", param="add_special_tokens"
            )
        usual = min(DEFAULT_MAX_TOKENS, defaults.max_tokens or DEFAULT_MAX_TOKENS)
        params = sampling_params(self, self.max_tokens or usual, self.logprobs, defaults)
        if self.echo and self.logprobs is not None:
            params = replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))
        return params


class CompletionChoice(Answer, frozen=True, kw_only=True):
    """One completion, or what is new of it. `stop_reason`: the stop string or stop token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer, frozen=True, kw_only=True):
    """The answer, or one event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | None = None
