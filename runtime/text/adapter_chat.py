"""What an adapter's directory says about chats: its own templates, special tokens, and tokens that the base model's
tokenizer may not have. Somebody else wrote the files, so each is read up to a limit, and regular ones alone.
"""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...graphs.untrusted_files import read_bounded, read_start
from ..api.errors import RequestError
from .chat_files import ChatTemplateError, ChatTemplates, templates_of
from .special_tokens import CONFIG, TokenFiles, read_object
from .tokenizer import FastTokenizer, Tokenizer

_log = logging.getLogger("sidestream")

MAX_FILE_BYTES = 4 << 20
MAX_TEMPLATE_BYTES = 1 << 18
"""Of all templates of an adapter together."""
MAX_TOKENS = 4096
MAX_TOKEN_CHARACTERS = 256
START_BYTES = 1 << 20
"""Of tokenizer.json, which names its added tokens before its vocabulary."""
NAMED_TOKENS = 5


@dataclass(frozen=True)
class AdapterChat:
    """An adapter's chat templates, their hash ("": none), and the texts of the added tokens of its tokenizer."""

    templates: ChatTemplates = field(default_factory=ChatTemplates)
    digest: str = ""
    added: tuple[str, ...] = ()


NO_CHAT = AdapterChat()


def read_adapter_chat(directory: Path, roots: Sequence[Path] | None = None) -> AdapterChat:
    """Return what is in the directory; `roots`: as for `open_regular`. Raises ChatTemplateError for files that are too
    large or cannot be read.
    """

    def read(path: Path) -> str | None:
        if not path.exists():
            return None
        content = read_bounded(path, MAX_FILE_BYTES, roots)
        if content is None:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        return content.decode()

    try:
        config = read_object(directory / CONFIG, read)
        special = read_object(directory / "special_tokens_map.json", read)
        added = read_object(directory / "added_tokens.json", read)
        templates = templates_of(directory, read)
        start = read_start(directory / "tokenizer.json", START_BYTES, roots)
    except (RequestError, ValueError, OSError) as problem:
        raise ChatTemplateError(f"its tokenizer's files cannot be read: {problem}") from None
    if sum(len(source.encode("utf-8", "replace")) for source in templates.values()) > MAX_TEMPLATE_BYTES:
        raise ChatTemplateError(f"its chat templates have more than {MAX_TEMPLATE_BYTES} bytes")
    files = TokenFiles(config, special, added)
    texts = [token["content"] for token in files.added(set())] + _added_tokens(start)
    kept = [text for text in dict.fromkeys(texts) if len(text) <= MAX_TOKEN_CHARACTERS]
    named = {name: text for name, text in files.named.items() if text in kept}
    found = ChatTemplates(templates, named)
    return AdapterChat(found, found.digest(), tuple(kept[:MAX_TOKENS]))


def warn_of_tokens(adapter: str, chat: AdapterChat, tokenizer: Tokenizer | None) -> None:
    """Log the added tokens of an adapter's tokenizer that the base model's does not have."""
    if not isinstance(tokenizer, FastTokenizer):
        return
    missing = [text for text in chat.added if not tokenizer.has_token(text)]
    if missing:
        _log.warning(
            "adapter %r: %d added tokens of its tokenizer are not in the base model's, which reads them as plain text: "
            "%s; add them to the base model's tokenizer if the adapter was trained with them",
            adapter, len(missing), ", ".join(map(repr, missing[:NAMED_TOKENS])),
        )  # fmt: skip


def _added_tokens(start: bytes) -> list[str]:
    """Return the added tokens that the beginning of a tokenizer.json lists."""
    text = start.decode(errors="ignore")
    place = text.find('"added_tokens"')
    found: Any = []
    with suppress(ValueError, RecursionError):
        found = json.JSONDecoder().raw_decode(text, text.index("[", place))[0] if place >= 0 else []
    entries = found if isinstance(found, list) else []
    return [str(each["content"]) for each in entries if isinstance(each, dict) and isinstance(each.get("content"), str)]
