"""Sampling of one request: `SamplingParams`, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, cast

from .checks import (
    MAX_ALLOWED,
    MAX_DRAFTS,
    MAX_STOPS,
    MAX_TOKENS,
    as_bad_words,
    as_biases,
    as_stop_strings,
    as_token_ids,
    check_integer,
    check_number,
    is_speculation,
    make_plain,
)
from .errors import RequestError
from .structured_outputs import StructuredOutputsParams

MAX_CHOICES = 256
MAX_LOGPROBS = MAX_TOKENS
DEFAULT_MAX_LOGPROBS = 20
RAW_LOGPROBS = "raw_logprobs"
"""Default of the option logprobs_mode: log-probabilities of the model's own logits."""
SEED_LIMIT = 1 << 63

REFUSED = {
    "best_of": "use n and pick by cumulative_logprob",
    "use_beam_search": "call LLM.beam_search with BeamSearchParams",
    "logits_processors": "use logit_bias, temperature, top_k, top_p or min_p",
    "guided_decoding": "use structured_outputs",
    "truncate_prompt_tokens": "cut the prompt's token ids before the call",
    "flat_logprobs": "leave it out",
    "extra_args": "leave it out",
    "thinking_token_budget": "send the chat to a server's /v1/chat/completions, which has it",
    "repetition_detection": "use repetition_penalty",
    "prompt_logprob_token_ids": "use prompt_logprobs",
    "prompt_logprob_start": "use prompt_logprobs, which begin at the second token",
    "trace_decode_token_ids": "score given answers with LLM.score",
}
"""Unsupported fields of vLLM -> remedy."""
_FINAL, _CUMULATIVE, _DELTA = 2, 0, 1  # vLLM's RequestOutputKind


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request; checked on construction.

    n                    number of completions; completion i uses seed + i
    temperature          0 = greedy (argmax; the lowest id wins a tie)
    top_k                keep the k likeliest tokens; 0 or -1 = off
    top_p                keep the smallest set of tokens with a total probability of at least top_p; 1 = off
    min_p                drop tokens less likely than min_p times the likeliest one; 0 = off
    seed                 seed of random numbers; None = derived from the engine's seed
    max_tokens           None = up to max_model_len
    min_tokens           no end-of-sequence or stop token before this many tokens
    stop                 strings that end the text; removed from it unless include_stop_str_in_output
    stop_token_ids       token ids that end the text, besides the model's own
    ignore_eos           ignore the model's own end-of-sequence tokens
    logprobs             number of likeliest tokens to report at each position, besides the sampled one, from the raw
                         logits; 0 = only the sampled one, -1 = the whole vocabulary. At most the engine's max_logprobs
    logprob_token_ids    report these tokens in place of the likeliest ones; `logprobs` is then their number
    prompt_logprobs      as logprobs, of the prompt's tokens from the second one on; the whole prompt is computed, even
                         if it is cached
    presence_penalty     subtracted from the logits of tokens in the output, -2..2
    frequency_penalty    the same, once per occurrence, -2..2
    repetition_penalty   divides positive and multiplies negative logits of tokens in prompt and output, > 0
    logit_bias           {token id: number added to its logit}, -100..100
    allowed_token_ids    sample only these tokens
    bad_words            words that are never generated, with or without a space before them: a word's last token is
                         banned after its other tokens
    skip_reading_prefix_cache  True = compute the whole prompt, even if it is cached
    structured_outputs   constraint on the answer: StructuredOutputsParams, or its fields as a dict
    speculation          drafts per step if the engine has speculation: "off", "auto" or 1 to 7, at most the engine's
                         number; None = the engine's. It does not change the tokens
    receipt              True = a server that has a key for it answers with a signed receipt
    detokenize           False = token ids only, without text
    output_kind          vLLM's RequestOutputKind; `generate` always returns whole answers, DELTA is refused

    Other fields of vLLM are refused unless they have no effect, as stream_interval, skip_clone and
    routed_experts_prompt_start.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Any = None
    guided_decoding: Any = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    output_kind: Any = None
    flat_logprobs: bool = False
    extra_args: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    speculation: str | int | None = None
    receipt: bool = False
    logprob_token_ids: Sequence[int] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    prompt_logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_start: int | None = None
    trace_decode_token_ids: Sequence[int] | None = None
    stream_interval: int | None = None
    skip_clone: bool = False
    routed_experts_prompt_start: int = 0

    def __post_init__(self) -> None:
        make_plain(self)
        for name, remedy in REFUSED.items():
            if not self._has_no_effect(name):
                raise RequestError(f"{name} is not supported; {remedy}")
        if self.output_kind is not None:
            kind = getattr(self.output_kind, "value", self.output_kind)
            if kind == _DELTA:
                raise RequestError("output_kind=DELTA is not supported; use stream")
            if kind not in (_CUMULATIVE, _FINAL):
                raise RequestError(f"output_kind={self.output_kind!r} must be a RequestOutputKind")
        if self.spaces_between_special_tokens is not True:
            raise RequestError("spaces_between_special_tokens=False is not supported; leave it out")
        check_integer("n", self.n, 1, MAX_CHOICES)
        check_number("temperature", self.temperature, 0.0, 100.0, "0 is greedy")
        check_number("top_p", self.top_p, 0.0, 1.0, "1 switches it off", low_open=True)
        check_integer("top_k", self.top_k, -1, MAX_TOKENS, "0 or -1 switches it off")
        check_number("min_p", self.min_p, 0.0, 1.0, "0 switches it off")
        if self.seed is not None:
            check_integer("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS, "None means: up to max_model_len")
        check_integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; raise max_tokens or lower "
                "min_tokens"
            )
        reported = tuple(dict.fromkeys(as_token_ids("logprob_token_ids", self.logprob_token_ids, MAX_ALLOWED)))
        object.__setattr__(self, "logprob_token_ids", reported or None)
        if reported:
            object.__setattr__(self, "logprobs", len(reported))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1, MAX_LOGPROBS, "-1 is the whole vocabulary")
        if self.skip_reading_prefix_cache not in (None, True, False):
            raise RequestError(f"skip_reading_prefix_cache={self.skip_reading_prefix_cache!r} must be True or False")
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            raise RequestError(
                "prompt_logprobs needs the whole prompt computed; leave skip_reading_prefix_cache=False out"
            )
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, "1 switches it off", low_open=True)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "receipt"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.speculation is not None and not is_speculation(self.speculation):
            raise RequestError(
                f"speculation={self.speculation!r} must be 'off', 'auto' or a number of drafts from 1 to {MAX_DRAFTS}"
            )
        object.__setattr__(self, "stop", as_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", as_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOPS))
        object.__setattr__(self, "logit_bias", as_biases(self.logit_bias))
        object.__setattr__(self, "bad_words", as_bad_words(self.bad_words))
        if self.allowed_token_ids is not None:
            allowed = as_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED)
            if not allowed:
                raise RequestError("allowed_token_ids is empty, so no token can be sampled; leave it out or add one")
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(allowed)))
        object.__setattr__(self, "structured_outputs", _as_structured_outputs(self.structured_outputs))
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need the text; set detokenize=True or use stop_token_ids")

    def _has_no_effect(self, name: str) -> bool:
        value = getattr(self, name)
        if name == "logits_processors":
            return value is None or (isinstance(value, Sequence) and len(value) == 0)
        if name == "best_of":
            return value is None or value == self.n
        if name == "thinking_token_budget" and value == -1:
            return True
        return value is None or value is False

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Return parameters with these fields; None means the default, except for max_tokens (no limit)."""
        kept = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        return cls(**kept)

    def clone(self) -> Self:
        """Return a copy; `dataclasses.replace` makes a changed one."""
        return replace(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return cast(tuple[str, ...], self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        return cast(tuple[int, ...], self.stop_token_ids)

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` as a dict."""
        return cast(dict[int, float], self.logit_bias)

    @property
    def allowed_ids(self) -> tuple[int, ...] | None:
        """`allowed_token_ids` as a tuple of distinct ids; None: all."""
        return cast(tuple[int, ...] | None, self.allowed_token_ids)

    @property
    def reported_ids(self) -> tuple[int, ...]:
        """`logprob_token_ids` as a tuple of distinct ids."""
        return cast(tuple[int, ...], self.logprob_token_ids or ())

    @property
    def banned_words(self) -> tuple[str, ...]:
        """`bad_words` as a tuple."""
        return cast(tuple[str, ...], self.bad_words)

    @property
    def constraint(self) -> StructuredOutputsParams | None:
        """`structured_outputs` as StructuredOutputsParams."""
        return cast(StructuredOutputsParams | None, self.structured_outputs)

    @property
    def greedy(self) -> bool:
        """Whether sampling is greedy."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether penalties need the former tokens."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def __repr__(self) -> str:
        changed = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != _DEFAULTS[field.name]
        )
        return f"SamplingParams({changed})"


def _as_structured_outputs(given: Any) -> StructuredOutputsParams | None:
    if isinstance(given, StructuredOutputsParams):
        given.check_text()
    if given is None or isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, Mapping):
        raise RequestError(f"structured_outputs must be StructuredOutputsParams, not {type(given).__name__}")
    try:
        return _as_structured_outputs(StructuredOutputsParams(**given))
    except TypeError:
        known = ", ".join(field.name for field in fields(StructuredOutputsParams))
        raise RequestError(f"structured_outputs has an unknown field; its fields are {known}") from None


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)} | {
    "stop": (),
    "stop_token_ids": (),
    "logit_bias": {},
    "bad_words": (),
}
