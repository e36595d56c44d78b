"""Which engines have seen a prompt's beginning, and so may still have its keys and values."""

from collections.abc import Sequence
from hashlib import blake2b

from msgspec.msgpack import encode

PAGE_TOKENS = 64
PAGE_CHARACTERS = 256
"""Of a prompt that is text: about as much as a page's tokens."""
DEPTHS = tuple(1 << power for power in range(12))
"""Pages after which a beginning gets a key: doubling, so a key more is worth as much as all before it."""
KEY_BYTES = 16
MAX_KEYS = 1 << 17
ENGINES_PER_KEY = 4


def chain(prompt: str | Sequence[int], adapter: str | None) -> list[bytes]:
    """Keys of the prompt's first 1, 2, 4 ... pages, as far as it has them. Beginnings under different adapters differ:
    so do their keys and values.
    """
    page = PAGE_CHARACTERS if isinstance(prompt, str) else PAGE_TOKENS
    state = blake2b((adapter or "").encode(), digest_size=KEY_BYTES, person=b"prompt beginning")
    keys, begin = [], 0
    for depth in DEPTHS:
        end = depth * page
        if end > len(prompt):
            break
        part = prompt[begin:end]
        # msgpack takes half of an array's time, and makes half as many bytes to hash
        state.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else encode(part))
        keys.append(state.copy().digest())
        begin = end
    return keys


class Prefixes:
    """The engines that were last given each beginning, at most `ENGINES_PER_KEY` of `MAX_KEYS` beginnings; what was not
    used for longest is forgotten. An engine is named by a number that it gives up when it loses its pages.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._engines: dict[bytes, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def note(self, keys: Sequence[bytes], engine: int) -> None:
        """An engine is given a prompt that begins so."""
        engines = self._engines
        for key in keys:
            former = engines.pop(key, ())
            engines[key] = (engine, *(each for each in former if each != engine))[:ENGINES_PER_KEY]
        while len(engines) > self._max_keys:
            del engines[next(iter(engines))]

    def engines(self, keys: Sequence[bytes]) -> list[tuple[int, tuple[int, ...]]]:
        """(pages, engines that were given so many), the longest beginning first."""
        found = []
        for index in range(len(keys) - 1, -1, -1):
            engines = self._engines.get(keys[index])
            if engines:
                found.append((DEPTHS[index], engines))
        return found
