"""How models spell calls of functions. The chat template tells which spelling a model was trained on."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFormat:
    """A call is `opener`, the function's name, `middle`, its arguments as JSON, `closer`; `separator` is between two.

    text_before   whether the model may say something before its first call
    """

    opener: str
    middle: str
    closer: str
    separator: str
    text_before: bool

    def head(self, name: str) -> str:
        """What stands before a function's arguments."""
        return self.opener + json.dumps(name) + self.middle


HERMES = ToolFormat('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n", True)
LLAMA3 = ToolFormat('{"name": ', ', "parameters": ', "}", "; ", False)


def format_of(chat_template: str | None) -> ToolFormat | None:
    """The spelling that a chat template speaks of (Hermes' is Qwen's too); None where it knows no tools."""
    if chat_template is None or "tools" not in chat_template:
        return None
    if "<tool_call>" in chat_template:
        return HERMES
    return LLAMA3 if '"parameters"' in chat_template else None
