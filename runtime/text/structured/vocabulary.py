"""The model's tokens as llguidance sees them: each one's bytes, and which ones are special."""

from collections.abc import Iterable
from typing import Any

from ...api.errors import RequestError
from ..tokenizer import FastTokenizer, Tokenizer

INSTALL = "structured outputs need the package llguidance; pip install 'sidestream[structured]'"

TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = [*(f"{TEXT}{{1,{most}}}" for most in (1, 2, 3, 5, 7, 10, 30)), TEXT + "+"]
"""Tokens that are a text of so many characters at most: llguidance looks at a set of them together where all of it, or
nothing, may come. Where a text may be as long as `maxLength` says, fewer and fewer fit near its end; its own sets (10,
30 and any number) would leave most of the tokens to be looked at one by one there.
"""


def import_llguidance() -> Any:
    """The package. Raises RequestError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(INSTALL) from None
    return llguidance


def grammar_vocabulary(tokenizer: Tokenizer | None, vocabulary: int, eos_ids: Iterable[int]) -> Any:
    """llguidance's tokenizer for a model with logits of `vocabulary` tokens.

    Raises RequestError without a tokenizer, without llguidance, and for a tokenizer that it cannot read.
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
