"""Damage files of the server's cache: a later start must read right data or make it again."""

import random
from pathlib import Path


def damage(cache: Path, source: random.Random) -> int:
    """Change half of the files of a cache (bits flipped, cut off, emptied, exchanged), and return their number."""
    files = sorted(path for path in cache.rglob("*") if path.is_file() and not path.is_symlink())
    chosen = source.sample(files, (len(files) + 1) // 2)
    for path in chosen:
        data = bytearray(path.read_bytes())
        kind = source.randrange(4)
        if kind == 0 and data:
            for _ in range(8):
                data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        elif kind == 1:
            del data[len(data) // 2 :]
        elif kind == 2:
            data = bytearray()
        else:
            data = bytearray(source.choice(files).read_bytes())
        path.write_bytes(data)
    return len(chosen)
