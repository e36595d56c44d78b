"""Chat templates: a list of messages becomes the text that a model was trained to answer.

A template is a program that came with a model, so it runs in a child process (`chat_worker`), sandboxed, with limits on
time, memory and output.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..processes.helper_process import ChildProcess
from .chat_files import DEFAULT, ChatTemplateError, ChatTemplates, check_size
from .chat_messages import Message, as_mapping

MAX_INPUT_CHARACTERS = 4 << 20
MAX_OUTPUT_CHARACTERS = 1 << 20
RENDER_SECONDS = 5.0
MAX_ERROR_BYTES = 1 << 16


class ChatWords(ChatTemplates):
    """A model with a single chat template (None: it has none), and the texts of its first and its last token."""

    def __init__(self, template: str | None, bos_token: str = "", eos_token: str = "") -> None:
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        super().__init__({} if template is None else {DEFAULT: template}, tokens)


class ChatTemplate:
    """A Jinja chat template. `tokens`: the special tokens that it may insert, by name, such as `eos_token`.

    Not thread-safe; `close` ends the child process. A text that it renders is to be encoded without further special
    tokens.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        check_size(source)
        self.source, self.tokens = source, dict(tokens or {})
        # -P keeps this folder, whose module names are ours, off the child's path
        worker = Path(__file__).with_name("chat_worker.py")
        self._child = ChildProcess([sys.executable, "-P", str(worker)], 6 * MAX_OUTPUT_CHARACTERS + MAX_ERROR_BYTES)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        continue_final_message: bool = False,
        seconds: float = RENDER_SECONDS,
    ) -> str:
        """Return the prompt of messages as `as_conversations` makes them. `variables`: more that the template may use.

        Raises ChatTemplateError, also when rendering takes more than `seconds`.
        """
        asked = {
            "template": self.source,
            "tokens": self.tokens,
            "messages": messages,
            "variables": variables,
            "continue": continue_final_message,
            "limit": MAX_OUTPUT_CHARACTERS,
        }
        try:
            line = json.dumps(asked, default=_plain)
        except (TypeError, ValueError, RecursionError) as problem:
            raise ChatTemplateError(
                f"the messages or the template's variables cannot be written as JSON: {str(problem)[:200]}"
            ) from None
        if len(line) > MAX_INPUT_CHARACTERS + len(self.source):
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


def _plain(value: Any) -> Any:
    """Return what a template sees of an object that JSON does not have: its fields, or the name of its type."""
    fields = as_mapping(value)
    if fields is not None:
        return dict(fields)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        return value.item()
    return f"<{type(value).__name__}>"
