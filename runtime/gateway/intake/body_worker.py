"""Body worker: decodes large request bodies in a child process of the gateway.

Protocol: {} when ready, then lines `FIELD=MODULE:STRUCT,... BODY` in (see `Shapes`), and lines of parts out, divided by
SEPARATOR: a BodyHead, and for a body whose prompt is a list of lists of token ids the body without it, and each list. A
body with integers that are written as decimal numbers comes back rewritten.
"""

import functools
import importlib
import re
import resource
import sys
from typing import Any

import msgspec

from ..interfaces import GatewayError
from .body_decoder import SEPARATOR, BodyHead, decode_with_source, field_in

MEMORY_BYTES = 4 << 30


@functools.cache
def _shapes(names: str) -> dict[str, type[Any]]:
    """Return the types by field."""
    shapes: dict[str, type[Any]] = {}
    for each in names.split(","):
        field, module, struct = re.split("[=:]", each)
        shapes[field] = getattr(importlib.import_module(module), struct)
    return shapes


def answer(line: bytes) -> bytes:
    """Return the answer to one line."""
    names, _, data = line.partition(b" ")
    encode = msgspec.json.encode
    try:
        shapes = _shapes(names.decode())
        field = field_in(data, shapes)
        body, source = decode_with_source(data, shapes[field])
    except GatewayError as error:
        return encode(BodyHead(error=(error.status, error.message, error.param)))
    except MemoryError:
        text = f"the body needs more than {MEMORY_BYTES >> 20} MiB of memory; send less in one request"
        return encode(BodyHead(error=(413, text, None)))
    head, prompt = encode(BodyHead(field, getattr(body, "model", None))), getattr(body, "prompt", None)
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
