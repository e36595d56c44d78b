"""Chat templates: a list of messages becomes the text that a model was trained to answer.

A template is a program that came with a model, so it runs in a child process (`chat_worker`), sandboxed, with limits on
time, memory and output.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..child_process import ChildProcess
from ..requests.errors import RequestError

MAX_TEMPLATE_CHARACTERS = 1 << 18
MAX_INPUT_CHARACTERS = 4 << 20
MAX_OUTPUT_CHARACTERS = 1 << 20
RENDER_SECONDS = 5.0
MAX_ERROR_BYTES = 1 << 16
ROLES = ("system", "user", "assistant", "tool")


class ChatTemplateError(RequestError):
    """A chat cannot be rendered: the template is too large, too slow, or refuses these messages."""


class ChatTemplate:
    """A Jinja chat template. `bos_token` and `eos_token` are what it may insert. Not thread-safe; `close` ends the
    child process. A text that it renders is to be encoded without further special tokens.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are allowed"
            )
        self.source, self.bos_token, self.eos_token = source, bos_token, eos_token
        # -P keeps this folder, whose module names are ours, off the child's path
        worker = Path(__file__).with_name("chat_worker.py")
        self._child = ChildProcess([sys.executable, "-P", str(worker)], 6 * MAX_OUTPUT_CHARACTERS + MAX_ERROR_BYTES)

    def render(self, messages: Sequence[Mapping[str, str]], seconds: float = RENDER_SECONDS, **variables: Any) -> str:
        """The prompt for the assistant's next answer. `messages`: {"role", "content"} each. `variables`: more that the
        template may use.

        Raises ChatTemplateError, also when rendering takes more than `seconds`.
        """
        for place, message in enumerate(messages):
            if message.get("role") not in ROLES:
                raise ChatTemplateError(
                    f"message {place} must have a role of {', '.join(ROLES)}, not {str(message.get('role'))[:40]!r}"
                )
            if not isinstance(message.get("content"), str):
                raise ChatTemplateError(f"message {place} must have a content that is text")
        given = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "add_generation_prompt": True,
            **variables,
            "messages": list(messages),
        }
        line = json.dumps({"template": self.source, "variables": given, "limit": MAX_OUTPUT_CHARACTERS})
        if len(line) > MAX_INPUT_CHARACTERS + MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(f"the chat has more than {MAX_INPUT_CHARACTERS} characters; start a new one")
        answer = self._ask(line.encode() + b"\n", seconds)
        if "text" not in answer:
            raise ChatTemplateError(f"the chat template failed: {answer.get('error', 'no text')}")
        return str(answer["text"])

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        try:
            return json.loads(self._child.ask(line, seconds))
        except (TimeoutError, OSError, ValueError) as problem:
            self.close()
            reason = f"it took more than {seconds:g} s" if isinstance(problem, TimeoutError) else "its process ended"
            raise ChatTemplateError(f"the chat template failed: {reason}") from None


class ChatWords(NamedTuple):
    """A model's chat template (None: it has none), and the texts of its first and its last token ("": unknown)."""

    template: str | None
    bos_token: str
    eos_token: str


def chat_words(directory: Path | None) -> ChatWords:
    """What a model's directory says (None: nothing). The template is chat_template.jinja, or else the field of
    tokenizer_config.json: a text, or a list of named ones, of which "default" is taken.

    Raises ChatTemplateError for files that cannot be read as such.
    """
    if directory is None:
        return ChatWords(None, "", "")
    config, alone = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    try:
        fields = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        if not isinstance(fields, dict):
            raise ValueError("tokenizer_config.json holds no object")
        source = alone.read_text(encoding="utf-8") if alone.is_file() else fields.get("chat_template")
    except (ValueError, OSError) as problem:
        raise ChatTemplateError(f"{directory}: the chat template cannot be read: {problem}") from None
    if isinstance(source, list):
        named = (entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default")
        source = next((entry.get("template") for entry in named), None)
    template = source if isinstance(source, str) else None
    return ChatWords(template, _token_text(fields.get("bos_token")), _token_text(fields.get("eos_token")))


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
