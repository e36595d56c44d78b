"""Body worker: decodes large request bodies in a child process of the gateway.

Protocol: {} when ready, then lines `MODULE:STRUCT BODY` in, and lines of parts out, divided by SEPARATOR: a BodyHead,
and for a body whose prompt is a list of lists of token ids the body without it, and each list. A body with integers
that are written as decimal numbers comes back rewritten.
"""

import functools
import importlib
import resource
import sys
from typing import Any

import msgspec

from ..interfaces import GatewayError
from .body_decoder import SEPARATOR, BodyHead, decode_with_source

MEMORY_BYTES = 4 << 30


@functools.cache
def _shape(name: str) -> type[Any]:
    module, _, struct = name.partition(":")
    shape: type[Any] = getattr(importlib.import_module(module), struct)
    return shape


def answer(line: bytes) -> bytes:
    """Return the answer to one line."""
    name, _, data = line.partition(b" ")
    encode = msgspec.json.encode
    try:
        body, source = decode_with_source(data, _shape(name.decode()))
    except GatewayError as error:
        return encode(BodyHead(error=(error.status, error.message, error.param)))
    except MemoryError:
        text = f"the body needs more than {MEMORY_BYTES >> 20} MiB of memory; send less in one request"
        return encode(BodyHead(error=(413, text, None)))
    head, prompt = encode(BodyHead(getattr(body, "model", None))), getattr(body, "prompt", None)
    if isinstance(prompt, list) and all(isinstance(each, list) for each in prompt):
        rest = msgspec.structs.replace(body, prompt=[0])
        return SEPARATOR.join([head, encode(rest), *map(encode, prompt)])
    return head if source is data else SEPARATOR.join([head, source.strip()])


def main() -> None:
    """Answer lines until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("{}", flush=True)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(line) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
