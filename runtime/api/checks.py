"""Checks of single request fields. Each raises RequestError with the field's name and its allowed values."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from .errors import RequestError

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
MAX_ALLOWED = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 4096
"""Of all bad words together: tokenizing them delays other requests."""
MAX_TOKENS = 1 << 24
BIAS_LIMIT = 100.0
MAX_DRAFTS = 7


def plain(value: Any) -> Any:
    """Return NumPy and torch values as Python numbers and lists, and anything else unchanged."""
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) and not isinstance(value, memoryview) else value


def make_plain(params: Any) -> None:
    """Apply `plain` to the fields of a frozen dataclass."""
    for each in fields(params):
        value = getattr(params, each.name)
        if hasattr(value, "tolist"):
            object.__setattr__(params, each.name, plain(value))


def check_text(name: str, text: str) -> None:
    """Raise RequestError for a string with half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} holds the lone surrogate {text[error.start]!a} at character {error.start}, which is not text; "
            "send both halves of the pair, or replace it: text.encode(errors='replace').decode()"
        ) from None


def check_integer(name: str, value: Any, low: int, high: int, hint: str = "") -> None:
    """Require an integer from low to high; `hint` explains a special value."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}={value!r} must be an integer from {low} to {high}" + (f" ({hint})" if hint else ""))


def check_number(name: str, value: Any, low: float, high: float, hint: str = "", low_open: bool = False) -> None:
    """Require a number from low to high (`low_open`: above low); `hint` explains a special value."""
    valid = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and low <= value <= high
        and not (low_open and value == low)
    )
    if not valid:  # also for NaN
        span = f"above {low:g} and at most {high:g}" if low_open else f"from {low:g} to {high:g}"
        raise RequestError(f"{name}={value!r} must be a number {span}" + (f" ({hint})" if hint else ""))


def is_speculation(value: Any) -> bool:
    """Return whether `value` is "off", "auto" or a number of drafts from 1 to MAX_DRAFTS."""
    if isinstance(value, int) and not isinstance(value, bool):
        return 1 <= value <= MAX_DRAFTS
    return value in ("off", "auto")


def as_stop_strings(stop: Any) -> tuple[str, ...]:
    """Return one or several stop strings, or None, as a tuple."""
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (stop,)
    if len(strings) > MAX_STOPS:
        raise RequestError(f"stop has {len(strings)} strings; at most {MAX_STOPS} are allowed")
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_LENGTH:
            raise RequestError(f"stop={string!r} must be a string of 1 to {MAX_STOP_LENGTH} characters")
        check_text("stop", string)
    return strings


def as_bad_words(words: Any) -> tuple[str, ...]:
    """Return a list of words, or None, as a tuple."""
    if words is None:
        return ()
    if not isinstance(words, Sequence) or isinstance(words, (str, bytes)):
        raise RequestError(f"bad_words={words!r} must be a list of words")
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words has {len(words)} words; at most {MAX_BAD_WORDS} are allowed")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError(f"bad_words holds {word!r}; each must be a word of more than spaces")
        check_text("bad_words", word)
    characters = sum(map(len, words))
    if characters > MAX_BAD_WORD_CHARACTERS:
        raise RequestError(
            f"bad_words has {characters} characters in all; at most {MAX_BAD_WORD_CHARACTERS} are allowed"
        )
    return tuple(words)


def as_token_ids(name: str, token_ids: Any, most: int) -> tuple[int, ...]:
    """Return one or several token ids, or None, as a tuple of at most `most`."""
    if token_ids is None:
        return ()
    many = isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes))
    values = tuple(map(plain, token_ids)) if many else (token_ids,)
    if len(values) > most:
        raise RequestError(f"{name} has {len(values)} entries; at most {most} are allowed")
    for value in values:
        check_integer(name, value, 0, MAX_TOKENS)
    return values


def as_biases(biases: Any) -> dict[int, float]:
    """Return a mapping from token ids to numbers, or None, as a dict."""
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias={biases!r} must map token ids to numbers, for example {{42: -100}}")
    if len(biases) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(biases)} entries; at most {MAX_BIASES} are allowed")
    biases = {plain(token): plain(value) for token, value in biases.items()}
    for token, value in biases.items():
        check_integer("logit_bias token", token, 0, MAX_TOKENS)
        check_number(f"logit_bias[{token}]", value, -BIAS_LIMIT, BIAS_LIMIT)
    return {token: float(value) for token, value in biases.items()}
