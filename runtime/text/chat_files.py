"""The chat templates and special tokens that a directory holds, a model's or an adapter's."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ..api.errors import RequestError
from .special_tokens import CONFIG, TokenFiles, read_object, read_text

TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
OLD_TEMPLATE = "chat_template.json"
MAX_TEMPLATE_CHARACTERS = 1 << 18
MAX_FILES = 256
DEFAULT, TOOL_USE = "default", "tool_use"


class ChatTemplateError(RequestError):
    """A chat cannot be rendered: the template is too large, too slow, or refuses these messages."""


@dataclass(frozen=True)
class ChatTemplates:
    """A model's chat templates.

    templates   name -> Jinja source; a single one is called "default"
    tokens      the special tokens that they may insert, such as `eos_token`, by name
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)

    def select(self, chosen: str | None, has_tools: bool) -> str:
        """Return the template to use, as transformers' get_chat_template does: the one that is `chosen`, by name or as
        a text; else "tool_use" where there are tools, else "default". Raises ChatTemplateError.
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
                f"the model has several chat templates ({', '.join(sorted(self.templates))}) and none is called "
                '"default"; name one with chat_template'
            )
        raise ChatTemplateError(
            "the model has no chat template (chat_template.jinja, or a field of tokenizer_config.json); give "
            "chat_template=..., or use generate with a prompt"
        )

    def over(self, base: "ChatTemplates") -> "ChatTemplates":
        """Return an adapter's templates and tokens, and those of `base` where it has none."""
        return ChatTemplates(self.templates, {**base.tokens, **self.tokens}) if self.templates else base

    def digest(self) -> str:
        """Return a hash of templates and tokens; "" without templates."""
        if not self.templates:
            return ""
        content = json.dumps([dict(self.templates), dict(self.tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def read_chat_templates(directory: Path | None, chat_template: str | None = None) -> ChatTemplates:
    """Return what a model's directory holds (None: nothing). `chat_template`: a text in place of its templates.

    Files in additional_chat_templates/ and chat_template.jinja come before chat_template.json, and this before the
    field of tokenizer_config.json: a text, or a list of named ones. Raises ChatTemplateError for files that cannot be
    read.
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
    """Return the text of a --chat-template. Raises ChatTemplateError."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8"
        raise ChatTemplateError(f"the chat template {path} cannot be read: {reason}; name a Jinja file") from None
    check_size(text)
    return text


def check_size(source: str) -> None:
    """Raises ChatTemplateError for a template that is too large."""
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are allowed"
        )


def templates_of(directory: Path, read: Callable[[Path], str | None] = read_text) -> dict[str, str]:
    """Return the templates in a directory by name; `read`: how files are read. Raises what it raises, RequestError."""
    more = directory / MORE_TEMPLATES
    names = sorted(islice((entry.name for entry in os.scandir(more)), MAX_FILES)) if more.is_dir() else []
    paths = {name.removesuffix(".jinja"): more / name for name in names if name.endswith(".jinja")}
    paths[DEFAULT] = directory / TEMPLATE
    found = {name: text for name, path in paths.items() if (text := read(path)) is not None}
    for name in () if found else (OLD_TEMPLATE, CONFIG):
        found = found or _of_field(read_object(directory / name, read).get("chat_template"))
    return found


def _of_field(value: object) -> dict[str, str]:
    """Return the templates that a field `chat_template` of a JSON file holds: a text, or a list of named texts."""
    if isinstance(value, str):
        return {DEFAULT: value}
    return {
        entry["name"]: entry["template"]
        for entry in (value if isinstance(value, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
