"""Chat templates and special tokens in the directory of a model or an adapter.

An adapter's files are untrusted: each is read up to a limit, and only regular files are read.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ...graphs.untrusted_files import read_bounded, read_start
from ..api.errors import RequestError
from .special_tokens import CONFIG, TokenFiles, read_object, read_text
from .tokenizer import FastTokenizer, Tokenizer

TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
OLD_TEMPLATE = "chat_template.json"
MAX_TEMPLATE_CHARACTERS = 1 << 18
MAX_FILES = 256
DEFAULT, TOOL_USE = "default", "tool_use"


class ChatTemplateError(RequestError):
    """A chat template is missing, too large or too slow, or rejects the messages."""


@dataclass(frozen=True)
class ChatTemplates:
    """A model's chat templates.

    templates   name -> Jinja source; a single one has the name "default"
    tokens      special tokens for the templates by name, such as `eos_token`
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)

    def select(self, chosen: str | None, has_tools: bool) -> str:
        """Return the template to use, as transformers' get_chat_template does.

        `chosen` is a name or a text; without it "tool_use" is used with tools, else "default". Raises
        ChatTemplateError.
        """
        if chosen is not None:
            if not isinstance(chosen, str):
                raise ChatTemplateError(f"chat_template must be a template's text, not {type(chosen).__name__}")
            return self.templates.get(chosen, chosen)
        if has_tools and TOOL_USE in self.templates:
            return self.templates[TOOL_USE]
        if DEFAULT in self.templates:
            return self.templates[DEFAULT]
        if self.templates:
            raise ChatTemplateError(
                f"the model has several chat templates ({', '.join(sorted(self.templates))}) and none is named "
                '"default"; name one with chat_template'
            )
        raise ChatTemplateError(
            "the model has no chat template (chat_template.jinja, or a field of tokenizer_config.json); give "
            "chat_template=..., or use generate with a prompt"
        )

    def over(self, base: "ChatTemplates") -> "ChatTemplates":
        """Return an adapter's templates and tokens, or `base` if it has no templates."""
        return ChatTemplates(self.templates, {**base.tokens, **self.tokens}) if self.templates else base

    def digest(self) -> str:
        """Return a hash of templates and tokens; "" without templates."""
        if not self.templates:
            return ""
        content = json.dumps([dict(self.templates), dict(self.tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]


class SingleChatTemplate(ChatTemplates):
    """A model with at most one chat template, and the texts of its BOS and EOS tokens."""

    def __init__(self, template: str | None, bos_token: str = "", eos_token: str = "") -> None:
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        super().__init__({} if template is None else {DEFAULT: template}, tokens)


def read_chat_templates(directory: Path | None, chat_template: str | None = None) -> ChatTemplates:
    """Return the templates of a model's directory (None: none). `chat_template`: a text that replaces them.

    Files in additional_chat_templates/ and chat_template.jinja precede chat_template.json, which precedes the field of
    tokenizer_config.json: a text, or a list of named ones. Raises ChatTemplateError for unreadable files.
    """
    if directory is None:
        return ChatTemplates({} if chat_template is None else {DEFAULT: chat_template})
    try:
        tokens = TokenFiles.of(directory).named
        templates = {DEFAULT: chat_template} if chat_template is not None else templates_of(directory)
    except (RequestError, ValueError, OSError) as problem:
        raise ChatTemplateError(f"{directory}: the chat template cannot be read: {problem}") from None
    return ChatTemplates(templates, tokens)


def read_template_file(path: str | Path) -> str:
    """Return the text of a template's file, or the argument itself if it is a template. Raises ChatTemplateError."""
    try:
        is_template = "{{" in str(path) or "{%" in str(path)
        text = str(path) if is_template else Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8"
        raise ChatTemplateError(
            f"the chat template {path} cannot be read: {reason}; name a Jinja file, or give a template"
        ) from None
    check_size(text)
    return text


def check_size(source: str) -> None:
    """Raise ChatTemplateError for a template that is too large."""
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are allowed"
        )


def templates_of(directory: Path, read: Callable[[Path], str | None] = read_text) -> dict[str, str]:
    """Return the templates in a directory by name. `read` reads a file; its errors and RequestError are raised."""
    more = directory / MORE_TEMPLATES
    names = sorted(islice((entry.name for entry in os.scandir(more)), MAX_FILES)) if more.is_dir() else []
    paths = {name.removesuffix(".jinja"): more / name for name in names if name.endswith(".jinja")}
    paths[DEFAULT] = directory / TEMPLATE
    found = {name: text for name, path in paths.items() if (text := read(path)) is not None}
    for name in () if found else (OLD_TEMPLATE, CONFIG):
        found = found or _of_field(read_object(directory / name, read).get("chat_template"))
    return found


def _of_field(value: object) -> dict[str, str]:
    """Return the templates in a JSON field `chat_template`: a text, or a list of named texts."""
    if isinstance(value, str):
        return {DEFAULT: value}
    return {
        entry["name"]: entry["template"]
        for entry in (value if isinstance(value, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }


_log = logging.getLogger("sidestream")

MAX_FILE_BYTES = 4 << 20
MAX_TEMPLATE_BYTES = 1 << 18  # of all templates of an adapter
MAX_TOKENS = 4096
MAX_TOKEN_CHARACTERS = 256
START_BYTES = 1 << 20  # of tokenizer.json, which has added tokens before its vocabulary
NAMED_TOKENS = 5


@dataclass(frozen=True)
class AdapterChat:
    """An adapter's chat templates, their hash ("": none), and its tokenizer's added tokens."""

    templates: ChatTemplates = field(default_factory=ChatTemplates)
    digest: str = ""
    added: tuple[str, ...] = ()


NO_CHAT = AdapterChat()


def read_adapter_chat(directory: Path, roots: Sequence[Path] | None = None) -> AdapterChat:
    """Return the chat data of an adapter's directory; `roots`: as for `open_regular`.

    Raises ChatTemplateError for files that are too large or unreadable.
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
            "adapter %r: %d added tokens of its tokenizer are not in the base model's, which encodes them as plain "
            "text: %s; add them to the base model's tokenizer if the adapter was trained with them",
            adapter, len(missing), ", ".join(map(repr, missing[:NAMED_TOKENS])),
        )  # fmt: skip


def _added_tokens(start: bytes) -> list[str]:
    """Return the added tokens listed at the start of a tokenizer.json."""
    text = start.decode(errors="ignore")
    place = text.find('"added_tokens"')
    found: Any = []
    with suppress(ValueError, RecursionError):
        found = json.JSONDecoder().raw_decode(text, text.index("[", place))[0] if place >= 0 else []
    entries = found if isinstance(found, list) else []
    return [str(each["content"]) for each in entries if isinstance(each, dict) and isinstance(each.get("content"), str)]
