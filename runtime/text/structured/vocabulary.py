"""The model's tokens for llguidance: their bytes, and which ones are special."""

from collections.abc import Iterable
from typing import Any

from ...api.errors import RequestError
from ..tokenizer import FastTokenizer, Tokenizer

INSTALL = "structured outputs need the package llguidance; pip install 'sidestream[structured]'"

TEXT = r'[^"\\\x00-\x1F\x7F]'
# Sets of tokens with a text of up to that many characters, which llguidance allows or forbids as a whole. Near the end
# of a text with `maxLength` few tokens fit; with its default sets (10, 30, unbounded) it would check most alone.
SLICES = [*(f"{TEXT}{{1,{most}}}" for most in (1, 2, 3, 5, 7, 10, 30)), TEXT + "+"]


def import_llguidance() -> Any:
    """Return the package. Raises RequestError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(INSTALL) from None
    return llguidance


def grammar_vocabulary(tokenizer: Tokenizer | None, vocabulary: int, eos_ids: Iterable[int]) -> Any:
    """Return llguidance's tokenizer for a model with logits of `vocabulary` tokens.

    Raises RequestError without a tokenizer or llguidance, and for an unsupported tokenizer.
    """
    llguidance = import_llguidance()
    ends = sorted(eos_ids)
    if tokenizer is None:
        raise RequestError("structured outputs need a tokenizer, and this model has none")
    try:
        if isinstance(tokenizer, FastTokenizer):
            count = max(vocabulary, tokenizer.size)
            return llguidance.LLTokenizer(tokenizer.definition(), n_vocab=count, eos_token=ends or None, slices=SLICES)
    except ValueError as error:
        raise RequestError(f"structured outputs cannot use this model's tokenizer: {str(error)[:300]}") from error
    raise RequestError(f"structured outputs cannot use a {type(tokenizer).__name__}")
