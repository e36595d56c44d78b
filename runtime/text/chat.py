"""Conversations: what `chat` is given, and the prompts that a model's chat template makes of it.

`LLM`, the clients and `sidestream chat` share it, so it imports neither the engine nor torch.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from ..requests.checks import check_text
from ..requests.errors import RequestError
from .chat_template import ChatTemplate, ChatTemplateError, ChatWords

Message = Mapping[str, Any]


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or several, as a list; a message's content that is a list of text parts becomes one text.

    Raises RequestError for anything else.
    """
    if not _is_list(messages):
        raise RequestError(f"messages must be a list of messages or a list of such lists, not {_kind(messages)}")
    several = messages if all(_is_list(entry) for entry in messages) else [messages]
    made = []
    for index, conversation in enumerate(several):
        where = f"conversation {index}: " if len(several) > 1 else ""
        if not conversation:
            raise RequestError(f"{where}there is no message; give at least one")
        made.append([_message(entry, f"{where}message {place}") for place, entry in enumerate(conversation)])
    return made


class ChatRenderer:
    """Makes prompts of conversations. Thread-safe.

    It keeps the template's child process for the next call; `close` ends it, and a later call starts another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._template: ChatTemplate | None = None

    def prompts(
        self,
        words: ChatWords,
        messages: Any,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """One prompt for each conversation; `words`: the model's template, which `chat_template` replaces.

        Raises RequestError for messages that are none, ChatTemplateError when there is no template or it refuses them.
        """
        source = words.template if chat_template is None else chat_template
        if source is None:
            raise ChatTemplateError(
                "the model has no chat template (chat_template.jinja, or a field of tokenizer_config.json); give "
                "chat_template=..., or use generate with a prompt"
            )
        if not isinstance(source, str):
            raise ChatTemplateError(f"chat_template must be a template's text, not {_kind(source)}")
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message=True needs add_generation_prompt=False")
        variables = {**(chat_template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        if tools is not None:
            variables["tools"] = list(tools)
        made = []
        for conversation in as_conversations(messages):
            with self._lock:
                text = self._load(words._replace(template=source)).render(conversation, **variables)
            made.append(_up_to_final_message(text, conversation) if continue_final_message else text)
        return made

    def close(self) -> None:
        """End the child process; waits for a prompt that is being made."""
        with self._lock:
            if self._template is not None:
                self._template.close()
                self._template = None

    def _load(self, words: ChatWords) -> ChatTemplate:
        template = self._template
        if template is None or ChatWords(template.source, template.bos_token, template.eos_token) != words:
            made = ChatTemplate(words.template or "", words.bos_token, words.eos_token)
            if template is not None:
                template.close()
            self._template = template = made
        return template


def _up_to_final_message(text: str, conversation: list[dict[str, Any]]) -> str:
    """A prompt without what the template puts after the last message, so that the model goes on with it."""
    said = conversation[-1]["content"].strip()
    place = text.rfind(said)
    if place < 0:
        raise ChatTemplateError("continue_final_message: the chat template changes the last message's text")
    return text[: place + len(said)]


def _message(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise RequestError(f"{where} must be a dict with a role and a content, not {_kind(entry)}")
    content = entry.get("content")
    if isinstance(content, str):
        check_text(f"{where}: content", content)
    if not _is_list(content):
        return dict(entry)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
            raise RequestError(
                f"{where} has a content part of type {str(kind)[:40]!r}; the model reads text only: "
                '{"type": "text", "text": "..."}'
            )
    return {**entry, "content": "\n".join(part["text"] for part in content)}


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _kind(value: Any) -> str:
    return type(value).__name__
