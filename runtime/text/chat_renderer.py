"""Renders conversations with a model's chat template.

A template is a program from a model's files, so it runs sandboxed in a child process (`chat_template_process`) with
limits on time, memory and output. `LLM`, the clients, the gateway and `sidestream chat` use it, so it imports neither
the engine nor torch.
"""

import contextlib
import json
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..api.errors import RequestError
from ..processes.helper_process import HelperProcess
from .chat_files import ChatTemplateError, ChatTemplates, check_size
from .chat_messages import ChatInputError, Message, as_conversations, as_mapping, is_list

MAX_INPUT_CHARACTERS = 4 << 20
MAX_OUTPUT_CHARACTERS = 1 << 20
RENDER_SECONDS = 5.0
MAX_ERROR_BYTES = 1 << 16
_OPTIONS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
# other arguments of transformers' apply_chat_template, which templates do not see
_NOT_VARIABLES = (
    "conversation", "conversations", "chat_template", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
)  # fmt: skip


class TemplateProcess:
    """A child process that renders Jinja chat templates.

    Not thread-safe. `render` starts it if it does not run; `close` ends it.
    """

    def __init__(self) -> None:
        # -P keeps this folder off the child's path: its module names would shadow others
        worker = Path(__file__).with_name("chat_template_process.py")
        self._child = HelperProcess([sys.executable, "-P", str(worker)], 6 * MAX_OUTPUT_CHARACTERS + MAX_ERROR_BYTES)

    def render(
        self,
        source: str,
        tokens: Mapping[str, str],
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        continue_final_message: bool = False,
        seconds: float = RENDER_SECONDS,
    ) -> str:
        """Return the prompt of messages from `as_conversations`. Encode it without further special tokens.

        source      the template
        tokens      special tokens for it by name, such as `eos_token`
        variables   its further variables

        Raises ChatTemplateError, also when rendering takes more than `seconds`.
        """
        check_size(source)
        asked = {
            "template": source,
            "tokens": dict(tokens),
            "messages": messages,
            "variables": variables,
            "continue": continue_final_message,
            "limit": MAX_OUTPUT_CHARACTERS,
        }
        try:
            line = json.dumps(asked, default=_plain)
        except (TypeError, ValueError, RecursionError) as problem:
            raise ChatTemplateError(
                f"the messages or the template's variables cannot be encoded as JSON: {str(problem)[:200]}"
            ) from None
        if len(line) > MAX_INPUT_CHARACTERS + len(source):
            raise ChatTemplateError(f"the chat has more than {MAX_INPUT_CHARACTERS} characters; start a new one")
        answer = self._ask(line.encode() + b"\n", seconds)
        if "text" not in answer:
            raise ChatTemplateError(f"the chat template failed: {answer.get('error', 'no text')}")
        return str(answer["text"])

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def _ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        try:
            return json.loads(self._child.ask(line, seconds))
        except (TimeoutError, OSError, ValueError) as problem:
            self.close()
            reason = f"it took more than {seconds:g} s" if isinstance(problem, TimeoutError) else "its process ended"
            raise ChatTemplateError(f"the chat template failed: {reason}") from None


class ChatRenderer:
    """Renders conversations in up to `processes` child processes at a time, kept for later calls. Thread-safe.

    `close` ends the processes, and a later call starts them again.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = [TemplateProcess() for _ in range(processes)]
        self._lock = threading.Lock()
        # last in, first out: processes start only for renderings at the same time
        self._idle: queue.LifoQueue[TemplateProcess] = queue.LifoQueue()
        for process in self.processes:
            self._idle.put(process)

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
        """Return one prompt per conversation.

        templates             the model's, or one per conversation
        chat_template         the name of one of them, or the text of another
        tools                 functions in OpenAI's format
        chat_template_kwargs  further variables of the template

        Raises ChatInputError for invalid messages and options, ChatTemplateError if there is no template or it fails.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message=True needs add_generation_prompt=False")
        variables = {
            **check_variables(chat_template_kwargs),
            "tools": None if tools is None else _tools(tools),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        conversations = as_conversations(messages)
        each = [templates] * len(conversations) if isinstance(templates, ChatTemplates) else templates
        made = []
        for found, conversation in zip(each, conversations, strict=True):
            source, goes_on = found.select(chat_template, tools is not None), bool(continue_final_message)
            with self._idle_process() as process:
                made.append(
                    process.render(source, found.tokens, conversation, variables, continue_final_message=goes_on)
                )
        return made

    def close(self) -> None:
        """End the child processes after the current renderings."""
        with self._lock, contextlib.ExitStack() as taken:  # the lock: two closing threads would wait for each other
            for process in [taken.enter_context(self._idle_process()) for _ in self.processes]:
                process.close()

    @contextlib.contextmanager
    def _idle_process(self) -> Iterator[TemplateProcess]:
        process = self._idle.get()
        try:
            yield process
        finally:
            self._idle.put(process)


def check_variables(given: Any, name: str = "chat_template_kwargs") -> dict[str, Any]:
    """Return further variables of a template; None: none. Raises ChatInputError, which calls them `name`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ChatInputError(f"{name} must be a dict of the template's variables, not {type(given).__name__}", name)
    for key in given:
        if not isinstance(key, str):
            raise ChatInputError(f"{name} must have names that are text, not {type(key).__name__}", name)
        if key in _OPTIONS:
            raise ChatInputError(f"{name} must not contain {key!r}; pass {key} next to {name}, not in it", name)
        if key in _NOT_VARIABLES:
            raise ChatInputError(
                f"{name} must not contain {key!r}, which is an option of transformers and not a template variable; "
                "leave it out",
                name,
            )
    documents = given.get("documents")
    if documents is not None and not (is_list(documents) and all(as_mapping(each) is not None for each in documents)):
        raise ChatInputError(f"{name}: documents must be a list of objects with a title and a text", name)
    return dict(given)


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    """Return the checked tools. Raises ChatInputError."""
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


def _plain(value: Any) -> Any:
    """Return an object that JSON does not support as its fields, or as the name of its type."""
    fields = as_mapping(value)
    if fields is not None:
        return dict(fields)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        return value.item()
    return f"<{type(value).__name__}>"
