"""Parse adapters' configs and safetensors headers in a child process, so that a hostile adapter can neither block the
GPU process nor reach its memory.
"""

import hashlib
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...graphs.adapter_config import AdapterError
from ...graphs.adapter_description import Description
from ...graphs.config import LlamaConfig
from ...graphs.draft.config import EagleConfig
from ..processes.helper_process import HelperProcess
from ..text.chat_files import AdapterChat, ChatTemplateError

TIMEOUT_SECONDS = 20.0
MAX_RESPONSE_BYTES = 64 << 20
"""An adapter with a LoRA for each expert has tens of thousands of tensors, with 300 bytes in a response for each."""

KEPT_UPDATES = 4
MAX_KEPT_HEADER = 16 << 20
"""Bytes of a header; descriptions of larger ones are not kept."""


class DescribeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of `describe_adapter`. `draft` replaces `config` for the LoRA of a trained draft; with `chat` only the
    chat templates and tokens are read, and compared with the tokenizer of the model in `base`. With `update`,
    `directory` is an update's file.
    """

    directory: str
    config: LlamaConfig | None
    max_rank: int
    lenient: bool
    roots: list[str] | None
    draft: EagleConfig | None = None
    chat: bool = False
    base: str | None = None
    update: bool = False


class DescribeResponse(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A description, chat files, or an error."""

    description: Description | None = None
    chat: AdapterChat | None = None
    error: str = "it cannot be described"


decode_request = msgspec.json.Decoder(DescribeRequest).decode
decode_response = msgspec.json.Decoder(DescribeResponse).decode


class AdapterDescriber:
    """Run `describe_adapter` in a child process (`describer_process`). Thread-safe; handles one call at a time."""

    def __init__(self, seconds: float = TIMEOUT_SECONDS) -> None:
        # -P keeps the working directory off sys.path
        self._child = HelperProcess(
            [sys.executable, "-P", "-m", f"{__package__}.describer_process"], MAX_RESPONSE_BYTES
        )
        self._seconds = seconds
        self._kept: OrderedDict[bytes, Description] = OrderedDict()

    def __call__(
        self, directory: Path, config: LlamaConfig, max_rank: int, lenient: bool, roots: Sequence[Path] | None
    ) -> Description:
        """See `describe_adapter`. Raises AdapterError, also when the child times out or dies."""
        draft = config if isinstance(config, EagleConfig) else None
        model = config if draft is None else None
        request = DescribeRequest(str(directory.absolute()), model, max_rank, lenient, _as_text(roots), draft)
        return self._describe(request, config)

    def describe_update(self, handle: int, config: LlamaConfig, max_rank: int, lenient: bool) -> Description:
        """See `describe_update`. Raises AdapterError, also when the child times out or dies.

        The last descriptions are kept: updates of a training run have one header, and differ in the values after it.
        """
        file = f"/proc/{os.getpid()}/fd/{handle}"
        request = DescribeRequest(file, config, max_rank, lenient, None, update=True)
        key = _key_of(handle, request)
        if (kept := self._kept.get(key)) is not None:
            return kept
        found = self._describe(request, config)
        if key:
            self._kept[key] = found
            while len(self._kept) > KEPT_UPDATES:
                self._kept.popitem(last=False)
        return found

    def _describe(self, request: DescribeRequest, config: LlamaConfig) -> Description:
        try:
            response = self._send(request)
            if response.description is not None:
                response.description.check(config, request.max_rank)
        except TimeoutError:
            raise AdapterError(
                f"its adapter_config.json and the header of its weights took more than {self._seconds:g} s to read: "
                "put it on a faster disk, or save it again with peft's save_pretrained"
            ) from None
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise AdapterError(
                f"its files could not be described ({error}): save it again with peft's save_pretrained"
            ) from None
        if response.description is None:
            raise AdapterError(response.error)
        return response.description

    def read_chat(self, directory: Path, roots: Sequence[Path] | None, base: Path | None) -> AdapterChat:
        """See `read_adapter_chat`. Raises ChatTemplateError, also when the child times out or dies."""
        try:
            response = self._send(
                DescribeRequest(
                    str(directory.absolute()),
                    None,
                    0,
                    False,
                    _as_text(roots),
                    chat=True,
                    base=None if base is None else str(base.absolute()),
                )
            )
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise ChatTemplateError(f"its tokenizer's files cannot be read ({error})") from None
        if response.chat is None:
            raise ChatTemplateError(response.error)
        return response.chat

    def _send(self, request: DescribeRequest) -> DescribeResponse:
        """Send a request; send it again once if the child has died, which another request may have caused."""
        line = msgspec.json.encode(request) + b"\n"
        try:
            answer = self._child.ask(line, self._seconds)
        except TimeoutError:
            raise
        except OSError:
            answer = self._child.ask(line, self._seconds)
        return decode_response(answer)

    def close(self) -> None:
        """End the child process; the next call starts another."""
        self._child.close()


def _key_of(handle: int, request: DescribeRequest) -> bytes:
    """Return a digest of all that an update's description depends on; b"" for a large header."""
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    if length > MAX_KEPT_HEADER:
        return b""
    digest = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(request, directory="")))
    digest.update(b"\n%d " % os.fstat(handle).st_size)
    digest.update(os.pread(handle, 8 + length, 0))
    return digest.digest()


def _as_text(roots: Sequence[Path] | None) -> list[str] | None:
    return None if roots is None else [str(root) for root in roots]
