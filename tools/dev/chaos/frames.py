"""Hostile frames: valid messages with bytes changed, and maps with fields of wrong types. Seeded."""

import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ....runtime.protocol import framing
from ....runtime.protocol import messages as protocol

SENT: Mapping[str, Any] = {
    "hello": protocol.Hello("chaos"),
    "beat": protocol.Beat(),
    "submit": protocol.Submit("a", prompt="What is the capital of France?", sampling=protocol.Sampling(max_tokens=4)),
    "abort": protocol.Abort(["a", "b"]),
    "load_adapter": protocol.LoadAdapter(call=1, name="x", path="/nowhere"),
    "unload_adapter": protocol.UnloadAdapter(call=2, name="x"),
    "list_adapters": protocol.ListAdapters(call=3),
    "get_stats": protocol.GetStats(call=4),
    "get_health": protocol.GetHealth(call=5),
}
"""One message of each type that a client may send."""
HONEST: Mapping[str, bytes] = {name: framing.encode(message)[protocol.HEADER_BYTES :] for name, message in SENT.items()}
FIELDS = sorted(
    {
        field.encode_name
        for kind in (*map(type, SENT.values()), protocol.Sampling, protocol.Continued)
        for field in msgspec.structs.fields(kind)
    }
    | {"type"}
)
TYPES = (*HONEST, "welcome", "chunks", "__class__", "")
NUMBERS = (
    *(0, -1, 1, 2**31 - 1, 2**31, 2**53, -(2**63), 2**63 - 1, 2**64 - 1),
    *(0.0, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
)
DEEP = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 500, b"\x81\xa1a" * 300)
"""Headers that promise more than follows, and nesting."""
ODD_BYTES = (0, 0x7F, 0x80, 0x8F, 0x9F, 0xC0, 0xC1, 0xC6, 0xCA, 0xCF, 0xD9, 0xDB, 0xDD, 0xDF, 0xFF)


def value(source: random.Random, depth: int = 0) -> Any:
    """Return a random value that msgpack can carry."""
    kind = source.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return source.choice(NUMBERS)
    if kind == 1:
        return source.choice((None, True, False))
    if kind == 2:
        letters = (source.randrange(32, 127), source.randrange(0xD7FF), 0, 0x202E)
        return "".join(chr(source.choice(letters)) for _ in range(source.choice((0, 1, 5, 70, 300))))
    if kind == 3:
        return source.randbytes(source.choice((0, 1, 20, 300)))
    if kind == 4:
        return source.randrange(300)
    if kind == 5:
        return source.choice(TYPES)
    if kind == 6:
        return [value(source, depth + 1) for _ in range(source.choice((0, 1, 3, 70)))]
    if kind == 7:
        return {source.choice(FIELDS): value(source, depth + 1) for _ in range(source.randrange(6))}
    return [source.randrange(-5, 400) for _ in range(source.choice((1, 8, 64)))]


def message(source: random.Random) -> bytes:
    """Return a map similar to a message."""
    made: dict[Any, Any] = {field: value(source) for field in source.sample(FIELDS, source.randrange(8))}
    if source.random() < 0.9:
        made["type"] = source.choice(TYPES)
    if made.get("type") == "submit" and source.random() < 0.7:  # sometimes near enough to be accepted
        made |= {
            "request_id": source.choice(("a", "b", f"r{source.randrange(10**6)}")),
            "prompt_token_ids": [source.randrange(256) for _ in range(9)],
        }
        made.pop("prompt", None)
        if source.random() < 0.5:
            made.pop("sampling", None)
    return msgspec.msgpack.encode(made)


def mutated(source: random.Random, data: bytes) -> bytes:
    """Return `data` with a few bytes changed, cut off, doubled or inserted."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 5))):
        place = source.randrange(len(changed) + 1)
        kind = source.randrange(6)
        if kind == 0 and changed:
            changed[place % len(changed)] ^= 1 << source.randrange(8)
        elif kind == 1 and changed:
            changed[place % len(changed)] = source.choice(ODD_BYTES)
        elif kind == 2:
            del changed[place:]
        elif kind == 3:
            changed[place:place] = source.randbytes(source.choice((1, 4, 30)))
        elif kind == 4:
            changed[place:place] = changed[: source.choice((1, 8, 64))]
        else:
            changed[place:place] = source.choice(DEEP)
    return bytes(changed)


def frames(source: random.Random, count: int, instance: bytes, known: Mapping[str, bytes] = HONEST) -> Iterator[bytes]:
    """Yield `count` hostile frames for an engine.

    `known` has messages to change; one with a `raw_` name is a whole frame, another follows a header.
    """
    names = list(known.items())
    head = framing.header(instance)
    for _ in range(count):
        kind = source.randrange(10)
        if kind < 4:
            yield head + message(source)
        elif kind < 9:
            name, data = source.choice(names)
            whole = data if name.startswith("raw_") else head + data
            yield mutated(source, whole) if source.random() < 0.3 else whole[:20] + mutated(source, whole[20:])
        else:
            yield struct.pack(">2sH", b"SS", source.choice((0, 1, 2, 65535))) + source.randbytes(
                source.choice((0, 15, 16, 17, 200))
            )
