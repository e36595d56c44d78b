"""Conversations: what `chat` is given, and the prompts that a model's chat template makes of it.

`LLM`, the clients, the gateway and `sidestream chat` share it, so it imports neither the engine nor torch.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ..api.errors import RequestError
from .chat_files import ChatTemplates
from .chat_messages import ChatInputError, as_conversations, as_mapping, is_list
from .chat_template import ChatTemplate

KEPT = 4
"""Templates whose child process is kept: a model's, and those of the adapters that were used last."""
_OPTIONS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_NOT_VARIABLES = (
    "conversation",
    "conversations",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "sanitize_control_tokens",
)
"""Other arguments of transformers' apply_chat_template, which no template sees."""


class _Kept:
    """A template and its lock."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template, self.lock = template, threading.Lock()

    def close(self) -> None:
        with self.lock:
            self.template.close()


class ChatRenderer:
    """Makes prompts of conversations. Thread-safe; each template runs in a child process of its own.

    It keeps the processes for the next call; `close` ends them, and a later call starts another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, tuple[tuple[str, str], ...]], _Kept] = OrderedDict()

    def prompts(
        self,
        templates: ChatTemplates | Sequence[ChatTemplates],
        messages: Any,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Return one prompt for each conversation.

        templates               the model's, or one's for each conversation
        chat_template           the name of one of them, or the text of another
        tools                   functions as OpenAI's API has them
        chat_template_kwargs    more variables of the template

        Raises ChatInputError for messages and options that are wrong, ChatTemplateError when there is no template or it
        refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message=True needs add_generation_prompt=False")
        variables = {
            **_variables(chat_template_kwargs),
            "tools": None if tools is None else _tools(tools),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        conversations = as_conversations(messages)
        each = [templates] * len(conversations) if isinstance(templates, ChatTemplates) else templates
        made = []
        for found, conversation in zip(each, conversations, strict=True):
            kept = self._load(found.select(chat_template, tools is not None), found.tokens)
            with kept.lock:
                goes_on = bool(continue_final_message)
                made.append(kept.template.render(conversation, variables, continue_final_message=goes_on))
        return made

    def close(self) -> None:
        """End the child processes; waits for prompts that are being made."""
        with self._lock:
            kept, self._kept = list(self._kept.values()), OrderedDict()
        for each in kept:
            each.close()

    def _load(self, source: str, tokens: Mapping[str, str]) -> _Kept:
        key = source, tuple(sorted(tokens.items()))
        old: _Kept | None = None
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                kept = self._kept[key] = _Kept(ChatTemplate(source, tokens))
                if len(self._kept) > KEPT:
                    old = self._kept.popitem(last=False)[1]
            self._kept.move_to_end(key)
        if old is not None:
            old.close()
        return kept


def _variables(given: Any) -> dict[str, Any]:
    """Check chat_template_kwargs. Raises ChatInputError that names it."""
    name = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ChatInputError(f"{name} must be a dict of the template's variables, not {type(given).__name__}", name)
    for key in given:
        if not isinstance(key, str):
            raise ChatInputError(f"{name} must have names that are text, not {type(key).__name__}", name)
        if key in _OPTIONS:
            raise ChatInputError(f"{name} must not hold {key!r}; give {key} next to {name}, not in it", name)
        if key in _NOT_VARIABLES:
            raise ChatInputError(
                f"{name} must not hold {key!r}, which is an option of transformers and no variable of a template; "
                "leave it out",
                name,
            )
    documents = given.get("documents")
    if documents is not None and not (is_list(documents) and all(as_mapping(each) is not None for each in documents)):
        raise ChatInputError(f"{name}: documents must be a list of objects with a title and a text", name)
    return dict(given)


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    """Check the tools. Raises ChatInputError."""
    if not is_list(tools):
        raise ChatInputError(f"tools must be a list of functions' schemas, not {type(tools).__name__}", "tools")
    made = []
    for place, tool in enumerate(tools):
        fields = as_mapping(tool)
        if fields is None:
            raise ChatInputError(
                f"tools[{place}] must be a function's schema as a dict, not {type(tool).__name__}", f"tools[{place}]"
            )
        made.append(fields)
    return made
