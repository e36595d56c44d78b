"""The child process of `describer`: reads one `DescribeRequest` per line as JSON, writes one `DescribeResponse`. It
runs without torch.
"""

import os
import resource
import sys
from pathlib import Path

import msgspec

from ...graphs.adapter_config import AdapterError
from ...graphs.adapter_description import describe_adapter, describe_update
from ..text.chat_files import ChatTemplateError, read_adapter_chat
from .describer import DescribeResponse, decode_request

MEMORY_BYTES = 1 << 30


def describe(line: bytes) -> DescribeResponse:
    """Handle one line."""
    request = decode_request(line)
    directory = Path(request.directory)
    roots = None if request.roots is None else [Path(root) for root in request.roots]
    try:
        if request.chat:
            base = None if request.base is None else Path(request.base)
            return DescribeResponse(chat=read_adapter_chat(directory, roots, base))
        config = request.config if request.draft is None else request.draft
        if config is None:
            return DescribeResponse(error="no model is named for it")
        if request.update:
            handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return DescribeResponse(describe_update(handle, config, request.max_rank, request.lenient))
            finally:
                os.close(handle)
        return DescribeResponse(describe_adapter(directory, config, request.max_rank, request.lenient, roots))
    except (AdapterError, ChatTemplateError) as error:
        return DescribeResponse(error=str(error))
    except MemoryError:
        files = "its tokenizer's files need" if request.chat else "its files need"
        return DescribeResponse(error=f"{files} more than {MEMORY_BYTES >> 20} MiB of memory to read")


def main() -> None:
    """Handle lines until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("{}", flush=True)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(describe(line)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
