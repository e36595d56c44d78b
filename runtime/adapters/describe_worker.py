"""The child process of `describing`: one JSON object a line, `Asked` in, `Answered` out. Needs no torch."""

import resource
import sys
from pathlib import Path

import msgspec

from ...graphs.adapter_config import AdapterError
from ...graphs.adapter_description import describe_adapter
from ..text.chat_files import ChatTemplateError, read_adapter_chat
from .describing import Answered, Asked

MEMORY_BYTES = 1 << 30


def describe(line: bytes) -> Answered:
    """The answer to one line."""
    asked = msgspec.json.decode(line, type=Asked)
    roots = None if asked.roots is None else [Path(root) for root in asked.roots]
    if asked.chat:
        return _chat(Path(asked.directory), roots)
    config = asked.config if asked.draft is None else asked.draft
    if config is None:
        return Answered(refused="no model is named for it")
    try:
        return Answered(describe_adapter(Path(asked.directory), config, asked.max_rank, asked.lenient, roots))
    except AdapterError as problem:
        return Answered(refused=str(problem))
    except MemoryError:
        return Answered(refused=f"its files need more than {MEMORY_BYTES >> 20} MiB of memory to read")


def _chat(directory: Path, roots: list[Path] | None) -> Answered:
    try:
        return Answered(chat=read_adapter_chat(directory, roots))
    except ChatTemplateError as problem:
        return Answered(refused=str(problem))
    except MemoryError:
        return Answered(refused=f"its tokenizer's files need more than {MEMORY_BYTES >> 20} MiB of memory to read")


def main() -> None:
    """Answers until its input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("{}", flush=True)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(describe(line)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
