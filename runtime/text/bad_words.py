"""The words of `bad_words` as the tokens that must not follow one another."""

from collections.abc import Sequence

from ..api.errors import RequestError
from .tokenizer import Tokenizer


def bad_word_ids(
    words: Sequence[str], tokenizer: Tokenizer | None, vocabulary: int, where: str = ""
) -> tuple[tuple[int, ...], ...]:
    """The token sequences of the words, as vLLM takes them: each word without a space in front, and with one if that
    begins with another token and has as many tokens. `where` begins the text of an error.

    Raises RequestError for words that cannot be banned.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError(f"{where}bad_words need a tokenizer, and this model has none; use logit_bias")
    sequences: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not plain:
            raise RequestError(f"{where}bad_words: the tokenizer has no tokens for {word!r}; leave it out")
        sequences.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
        if max(map(max, sequences[-2:])) >= vocabulary:
            raise RequestError(
                f"{where}bad_words: {word!r} has a token outside the model's vocabulary of {vocabulary}; is this "
                "another model's tokenizer?"
            )
    if len({ids[0] for ids in sequences if len(ids) == 1}) >= vocabulary:
        raise RequestError(f"{where}bad_words bans every token of the vocabulary; leave some out")
    return tuple(map(tuple, sequences))
