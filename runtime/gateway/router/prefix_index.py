"""Engines that have seen a prompt's prefix, and so may still have its KV pages."""

from collections.abc import Sequence
from hashlib import blake2b

from msgspec.msgpack import encode

PAGE_TOKENS = 64
PAGE_CHARACTERS = 256
"""Characters of a text prompt that count as a page: about as many as PAGE_TOKENS tokens."""
DEPTHS = tuple(1 << power for power in range(12))
"""Numbers of pages after which a prefix gets a key."""
KEY_BYTES = 16
MAX_KEYS = 1 << 17
ENGINES_PER_KEY = 4


def prefix_keys(prompt: str | Sequence[int], adapter: str | None) -> list[bytes]:
    """Return the keys of the prompt's first 1, 2, 4 ... pages.

    Keys depend on the adapter, since keys and values of attention do.
    """
    page = PAGE_CHARACTERS if isinstance(prompt, str) else PAGE_TOKENS
    state = blake2b((adapter or "").encode(), digest_size=KEY_BYTES, person=b"prompt beginning")
    keys, start = [], 0
    for depth in DEPTHS:
        end = depth * page
        if end > len(prompt):
            break
        part = prompt[start:end]
        # msgpack takes half the time of `array`, and makes half as many bytes to hash
        state.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else encode(part))
        keys.append(state.copy().digest())
        start = end
    return keys


class PrefixIndex:
    """The last engines that received each prefix: up to ENGINES_PER_KEY for MAX_KEYS prefixes, evicted by LRU.

    An engine has a number, which changes when it loses its pages.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._engines: dict[bytes, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def add(self, keys: Sequence[bytes], engine: int) -> None:
        """Record that an engine received a prompt with these keys."""
        engines = self._engines
        for key in keys:
            former = engines.pop(key, ())
            engines[key] = (engine, *(each for each in former if each != engine))[:ENGINES_PER_KEY]
        while len(engines) > self._max_keys:
            del engines[next(iter(engines))]

    def engines(self, keys: Sequence[bytes]) -> list[tuple[int, tuple[int, ...]]]:
        """Return (pages, engines that received a prefix of so many pages), the longest prefix first."""
        found = []
        for index in range(len(keys) - 1, -1, -1):
            engines = self._engines.get(keys[index])
            if engines:
                found.append((DEPTHS[index], engines))
        return found
