"""Which tokens may not come next, as words of `bad_words` would be complete with them."""

from collections.abc import Iterable


class Forbidden:
    """Token sequences that an output must not hold: the last token of one is forbidden where the output ends with the
    tokens before it. As in vLLM, the prompt does not count.

    `always`: tokens that are forbidden at every step, of sequences of one token.
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self.always: set[int] = set()
        self._after: dict[int, list[tuple[list[int], int]]] = {}  # last token before -> (all tokens before, the token)
        for *before, token in sequences:
            if before:
                self._after.setdefault(before[-1], []).append((before, token))
            else:
                self.always.add(token)

    @property
    def needs_history(self) -> bool:
        """Whether it matters which tokens came before."""
        return bool(self._after)

    def after(self, tokens: list[int], start: int) -> set[int]:
        """The tokens that may not follow `tokens`, of which the output are those from `start` on."""
        if len(tokens) == start or tokens[-1] not in self._after:
            return self.always
        room = len(tokens) - start
        return self.always | {
            token
            for before, token in self._after[tokens[-1]]
            if len(before) <= room and tokens[-len(before) :] == before
        }
