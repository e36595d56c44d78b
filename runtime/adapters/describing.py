"""Adapters are described in a process of their own: what an adapter's config and header say is parsed there, so that
neither its patterns nor its JSON hold up the process that drives the GPU, or get at its memory.
"""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...graphs.adapter_config import AdapterError
from ...graphs.adapter_description import Description
from ...graphs.config import LlamaConfig
from ...graphs.draft.config import EagleConfig
from ..processes.helper_process import ChildProcess
from ..text.chat_files import AdapterChat, ChatTemplateError

SECONDS = 20.0
MOST_BYTES = 4 << 20


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of `describe_adapter`; paths as text."""

    directory: str
    config: LlamaConfig | None
    max_rank: int
    lenient: bool
    roots: list[str] | None
    draft: EagleConfig | None = None
    """In place of `config`, for the adapter of a trained draft."""
    chat: bool = False
    """Whether what the directory says about chats is asked for, and nothing else."""


class Answered(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A description, or why there is none."""

    found: Description | None = None
    chat: AdapterChat | None = None
    refused: str = "it cannot be described"


class AdapterDescriber:
    """`describe_adapter` in a child process (`describe_worker`). Safe for several threads; one is served at a time."""

    def __init__(self, seconds: float = SECONDS) -> None:
        # -P keeps the folder that it is started in off its path
        self._child = ChildProcess([sys.executable, "-P", "-m", f"{__package__}.describe_worker"], MOST_BYTES)
        self._seconds = seconds
        self._lock = threading.Lock()

    def __call__(
        self, directory: Path, config: LlamaConfig, max_rank: int, lenient: bool, roots: Sequence[Path] | None
    ) -> Description:
        """See `describe_adapter`. Raises AdapterError, also when the child takes too long or dies."""
        draft = config if isinstance(config, EagleConfig) else None
        asked = Asked(
            str(directory.absolute()),
            config if draft is None else None,
            max_rank,
            lenient,
            None if roots is None else [str(one) for one in roots],
            draft,
        )
        try:
            line = msgspec.json.encode(asked) + b"\n"
            answer = msgspec.json.decode(self._ask(line), type=Answered)
            if answer.found is not None:
                answer.found.check(config, max_rank)
        except TimeoutError:
            raise AdapterError(
                f"its adapter_config.json and the header of its weights took more than {self._seconds:g} s to read: "
                "put it on a faster disk, or save it again with peft's save_pretrained"
            ) from None
        except (OSError, ValueError) as problem:  # msgspec's errors are ValueErrors
            raise AdapterError(
                f"its files could not be described ({problem}): save it again with peft's save_pretrained"
            ) from None
        if answer.found is None:
            raise AdapterError(answer.refused)
        return answer.found

    def read_chat(self, directory: Path, roots: Sequence[Path] | None) -> AdapterChat:
        """See `read_adapter_chat`. Raises ChatTemplateError, also when the child takes too long or dies."""
        places = None if roots is None else [str(one) for one in roots]
        asked = Asked(str(directory.absolute()), None, 0, False, places, chat=True)
        try:
            answer = msgspec.json.decode(self._ask(msgspec.json.encode(asked) + b"\n"), type=Answered)
        except (OSError, ValueError) as problem:  # TimeoutError is an OSError
            raise ChatTemplateError(f"its tokenizer's files cannot be read ({problem})") from None
        if answer.chat is None:
            raise ChatTemplateError(answer.refused)
        return answer.chat

    def _ask(self, line: bytes) -> bytes:
        """Asked again once if the child has died: that need not be this adapter's fault."""
        with self._lock:
            try:
                return self._child.ask(line, self._seconds)
            except TimeoutError:
                raise
            except OSError:
                return self._child.ask(line, self._seconds)

    def close(self) -> None:
        """End the child process; the next call starts another."""
        with self._lock:
            self._child.close()
