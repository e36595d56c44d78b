"""Chat templates and special tokens in the directory of a model or an adapter.

An adapter's files are untrusted: each is read up to a limit, and only regular files are read.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ...graphs.files.untrusted_files import read_bounded, read_start
from ..api.errors import RequestError
from .special_tokens import CONFIG, TokenFiles, read_object, read_text
from .tokenizer import load_tokenizer

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

    def __post_init__(self) -> None:
        # hundreds of adapters have copies of one template
        object.__setattr__(self, "templates", {name: sys.intern(text) for name, text in self.templates.items()})

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


MAX_FILE_BYTES = 4 << 20
MAX_TEMPLATE_BYTES = 1 << 18  # of all templates of an adapter
MAX_TOKENS = 4096  # listed as unknown
START_BYTES = 1 << 20  # of tokenizer.json, which has added tokens before its vocabulary
NAMED_TOKENS = 5
_PRINTABLE = re.compile(r"[!-~]{1,40}")
CHAT_FILES = {
    **dict.fromkeys((TEMPLATE, OLD_TEMPLATE, CONFIG, "special_tokens_map.json", "added_tokens.json"), MAX_FILE_BYTES),
    "tokenizer.json": 64 << 20,
}
"""Files of an adapter's directory, besides config and weights, that are read or copied, and their largest sizes."""


@dataclass(frozen=True)
class AdapterChat:
    """An adapter's chat templates and their hash ("": none).

    unknown   tokens of its tokenizer that the base model's lacks or has under another id -> id, -1 without one
    """

    templates: ChatTemplates = field(default_factory=ChatTemplates)
    digest: str = ""
    unknown: Mapping[str, int] = field(default_factory=dict)

    def token_problem(self, vocab_size: int) -> str:
        """Return the error for `unknown`. `vocab_size`: rows of the base model's embedding."""
        shown = ", ".join(
            (repr(text) if _PRINTABLE.fullmatch(text) else f"(a text of {len(text)} characters)")
            + (f" ({number})" if number >= 0 else "")
            for text, number in islice(self.unknown.items(), NAMED_TOKENS)
        )
        remedy = "add them to the base model's tokenizer, with these ids"
        if max(self.unknown.values()) >= vocab_size:
            remedy = f"the base model has embeddings for ids below {vocab_size}: train without added tokens"
        return (
            f"{len(self.unknown)} tokens of its tokenizer are not in the base model's, or have other ids there, so "
            f"that prompts would not be tokenized as in training: {shown}; {remedy}; if no text of the training had "
            "them, start with lora_lenient=True"
        )


NO_CHAT = AdapterChat()


def read_adapter_chat(directory: Path, roots: Sequence[Path] | None = None, base: Path | None = None) -> AdapterChat:
    """Return the chat data of an adapter's directory.

    roots   as for `open_regular`
    base    directory of the base model, whose tokenizer must have the adapter's tokens; None: not compared

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
    tokens = _token_ids(files, start)
    found = ChatTemplates(templates, {name: text for name, text in files.named.items() if text in tokens})
    tokens.pop(files.named.get("pad_token", ""), None)  # no text has it
    return AdapterChat(found, found.digest(), {} if base is None else _unknown(tokens, base))


def _token_ids(files: TokenFiles, start: bytes) -> dict[str, int]:
    """Return the special and added tokens of a directory -> id, or -1. `start`: of its tokenizer.json."""
    ids = {token["content"]: -1 for token in files.added(set())}
    ids |= {token["content"]: number for number, token in files.by_id.items()}
    return ids | _added_tokens(start)


def _unknown(tokens: Mapping[str, int], base: Path) -> dict[str, int]:
    """Return the tokens that the tokenizer of the base model lacks or has under another id."""
    if tokens.items() <= _base_tokens(base).items():
        return {}
    tokenizer = _base_tokenizer(base)
    if tokenizer is None:
        return {}
    places = {text: tokenizer.token_id(text) for text in tokens}
    other = {
        text: number for text, number in tokens.items() if places[text] is None or number not in (-1, places[text])
    }
    return dict(islice(other.items(), MAX_TOKENS))


@lru_cache(maxsize=2)
def _base_tokens(base: Path) -> dict[str, int]:
    return _token_ids(TokenFiles.of(base), read_start(base / "tokenizer.json", START_BYTES))


_base_tokenizer = lru_cache(maxsize=2)(load_tokenizer)


def _added_tokens(start: bytes) -> dict[str, int]:
    """Return the added tokens, text -> id, that are listed at the start of a tokenizer.json."""
    text = start.decode(errors="ignore")
    place = text.find('"added_tokens"')
    found: Any = []
    with suppress(ValueError, RecursionError):
        found = json.JSONDecoder().raw_decode(text, text.index("[", place))[0] if place >= 0 else []
    return {
        each["content"]: each["id"]
        for each in (found if isinstance(found, list) else ())
        if isinstance(each, dict) and isinstance(each.get("content"), str) and isinstance(each.get("id"), int)
    }
