"""How one request samples: `SamplingParams`, with the spellings that vLLM's users know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, cast

from .errors import RequestError

MAX_CHOICES = 256
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
MAX_TOKENS = 1 << 24
SEED_LIMIT = 1 << 63
BIAS_LIMIT = 100.0

REFUSED = {
    "prompt_logprobs": "score the prompt with max_tokens=1 calls and logprobs instead",
    "best_of": "use n and pick by cumulative_logprob",
    "use_beam_search": "use n with temperature > 0",
    "bad_words": "give the words' token ids -100 in logit_bias",
    "allowed_token_ids": "give the allowed token ids 100 in logit_bias",
    "logits_processors": "use logit_bias, temperature, top_k, top_p or min_p",
    "guided_decoding": "constrain the text after generation",
    "structured_outputs": "constrain the text after generation",
    "truncate_prompt_tokens": "cut the prompt's token ids before the call",
    "flat_logprobs": "leave it out",
    "extra_args": "leave it out",
    "skip_reading_prefix_cache": "give LLM enable_prefix_caching=False",
}
"""vLLM's fields that ask for what there is not, and what to do instead."""
_LISTS = ("bad_words", "logits_processors")
_FINAL, _CUMULATIVE, _DELTA = 2, 0, 1  # vLLM's RequestOutputKind


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request; checked on construction.

    n                    how many completions of the prompt; completion i draws with seed + i
    temperature          0 = greedy (argmax, the lowest id wins a tie)
    top_k                keep the k likeliest tokens; 0 or -1 = off
    top_p                keep the smallest set of tokens whose probabilities reach top_p; 1 = off
    min_p                drop tokens less likely than min_p times the likeliest one; 0 = off
    seed                 makes the draw repeatable; None = drawn from the engine's seed
    max_tokens           None = as many as max_model_len leaves room for
    min_tokens           no end-of-sequence or stop token before this many tokens
    stop                 strings that end the text; cut off unless include_stop_str_in_output
    stop_token_ids       token ids that end the text, next to the model's own (ignore_eos switches only those off)
    logprobs             report this many likeliest tokens and the chosen one, at each position, from the raw logits (0
                         = only the chosen one)
    presence_penalty, frequency_penalty   subtracted from the logits of tokens in the output (once; once per
                                          occurrence), -2..2
    repetition_penalty   divides positive and multiplies negative logits of tokens in prompt and output, > 0
    logit_bias           {token id: number added to its logit}, -100..100
    detokenize           False = token ids only, the text stays ''
    output_kind          vLLM's RequestOutputKind; `generate` gives whole answers whatever it is, DELTA is refused

    The other fields are vLLM's, and refused unless they ask for nothing.
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
    structured_outputs: Any = None
    truncate_prompt_tokens: int | None = None
    output_kind: Any = None
    flat_logprobs: bool = False
    extra_args: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        for name, remedy in REFUSED.items():
            if not self._asks_nothing(name):
                raise RequestError(f"{name} is not supported; {remedy}")
        if self.output_kind is not None:
            kind = getattr(self.output_kind, "value", self.output_kind)
            if kind == _DELTA:
                raise RequestError("output_kind=DELTA is not supported; use stream, which gives what each step added")
            if kind not in (_CUMULATIVE, _FINAL):
                raise RequestError(f"output_kind={self.output_kind!r} must be a RequestOutputKind")
        if self.spaces_between_special_tokens is not True:
            raise RequestError("spaces_between_special_tokens=False is not supported; leave it out")
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 100.0, "0 is greedy")
        _number("top_p", self.top_p, 0.0, 1.0, "1 switches it off", low_open=True)
        _integer("top_k", self.top_k, -1, MAX_TOKENS, "0 or -1 switches it off")
        _number("min_p", self.min_p, 0.0, 1.0, "0 switches it off")
        if self.seed is not None:
            _integer("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS, "None means: up to max_model_len")
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; raise max_tokens or lower "
                "min_tokens"
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, "1 switches it off", low_open=True)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} must be True or False")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need the text; set detokenize=True or use stop_token_ids")

    def _asks_nothing(self, name: str) -> bool:
        value = getattr(self, name)
        if name in _LISTS:
            return value is None or (isinstance(value, Sequence) and len(value) == 0)
        if name == "best_of":
            return value is None or value == self.n
        return value is None or value is False

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Parameters of these fields, where None stands for the default (max_tokens=None still for no limit)."""
        kept = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        return cls(**kept)

    def clone(self) -> Self:
        """A copy; as parameters do not change, `dataclasses.replace` makes a changed one."""
        return replace(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return cast(tuple[str, ...], self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids`, always as a tuple."""
        return cast(tuple[int, ...], self.stop_token_ids)

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias`, always as a dict."""
        return cast(dict[int, float], self.logit_bias)

    @property
    def greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the next token's logits depend on which tokens came before (beyond the model itself)."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def __repr__(self) -> str:
        changed = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != _DEFAULTS[field.name]
        )
        return f"SamplingParams({changed})"


def _integer(name: str, value: Any, low: int, high: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}={value!r} must be an integer from {low} to {high}" + (f" ({hint})" if hint else ""))


def _number(name: str, value: Any, low: float, high: float, hint: str = "", low_open: bool = False) -> None:
    valid = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and low <= value <= high
        and not (low_open and value == low)
    )
    if not valid:  # NaN fails the comparison as well
        span = f"above {low:g} and at most {high:g}" if low_open else f"from {low:g} to {high:g}"
        raise RequestError(f"{name}={value!r} must be a number {span}" + (f" ({hint})" if hint else ""))


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (stop,)
    if len(strings) > MAX_STOPS:
        raise RequestError(f"stop has {len(strings)} strings; at most {MAX_STOPS} are allowed")
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_LENGTH:
            raise RequestError(f"stop={string!r} must be a string of 1 to {MAX_STOP_LENGTH} characters")
    return strings


def _token_ids(token_ids: Any) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    values = (
        tuple(token_ids)
        if isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes))
        else (token_ids,)
    )
    if len(values) > MAX_STOPS:
        raise RequestError(f"stop_token_ids has {len(values)} entries; at most {MAX_STOPS} are allowed")
    for value in values:
        _integer("stop_token_ids", value, 0, MAX_TOKENS)
    return values


def _biases(biases: Any) -> dict[int, float]:
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias={biases!r} must map token ids to numbers, for example {{42: -100}}")
    if len(biases) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(biases)} entries; at most {MAX_BIASES} are allowed")
    for token, value in biases.items():
        _integer("logit_bias token", token, 0, MAX_TOKENS)
        _number(f"logit_bias[{token}]", value, -BIAS_LIMIT, BIAS_LIMIT)
    return {token: float(value) for token, value in biases.items()}


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)} | {
    "stop": (),
    "stop_token_ids": (),
    "logit_bias": {},
}
