"""Chat template worker: renders Jinja templates in a child process, because Jinja's sandbox limits no time or memory.

`chat_renderer` runs this script, which needs only jinja2. Protocol, one JSON object per line: {} when ready, then
{"template", "tokens", "messages", "variables", "continue", "limit"} in, {"text"} or {"error"} out. `tokens` are the
model's special tokens by name; `variables` override them.
"""

import json
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 512 << 20
KEPT_TEMPLATES = 8
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # ends the message to continue, as in transformers; text after it is cut off
PROBE = "4815162342"  # content that no filter changes
DEFAULTS = {"tools": None, "documents": None, "add_generation_prompt": False}  # variables of every template

Message = dict[str, Any]


class RefusedError(ValueError):
    """The request cannot be rendered; the text is for the caller."""


class Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks answers for training: returns its text unchanged.

    As in transformers it is a block of its own: variables set in it end with it.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        """Return the inner nodes as the body of a call."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class Dict:
    """`dict` of a template: without the attributes of Python's class."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


class Namespace(jinja2.utils.Namespace):
    """`namespace` of a template: without attributes that begin with an underscore."""

    def __init__(*args: Any, **named: Any) -> None:
        values = dict(*args[1:], **named)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have an attribute {name!r}")


def environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja environment of chat templates: transformers' settings, filters and functions."""

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(str(message))

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    made.globals["dict"] = Dict()
    made.globals["namespace"] = Namespace
    return made


class Forms(NamedTuple):
    """Contents that a template renders: a text, a list of parts."""

    text: bool
    parts: bool


class _Part(dict[str, str]):
    """A part that is invisible when the whole list is rendered as text."""

    def __repr__(self) -> str:
        return ""


class Template:
    """A compiled template. `forms` detects which forms of content it renders."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._compiled = environment().from_string(source)
        self._forms: dict[str, Forms] = {}

    def render(self, messages: list[Message], variables: dict[str, Any], limit: int) -> str:
        """Return the rendered text. Raises RefusedError above `limit` characters, and the template's errors."""
        pieces, length = [], 0
        # a dict and not keywords: variables may have any name
        for piece in self._compiled.generate({**variables, "messages": messages}):
            length += len(piece)
            if length > limit:
                raise RefusedError(f"the rendered chat has more than {limit} characters")
            pieces.append(piece)
        return "".join(pieces)

    def forms(self, role: str, tokens: dict[str, Any], limit: int) -> Forms:
        """Render both forms of content in a small conversation, without the caller's variables.

        Syntax does not suffice: templates loop over parts in macros, through filters, by index, or for one role only.
        """
        if role not in self._forms:
            found = Forms(
                self._shows(_conversation(role, PROBE), tokens, limit),
                self._shows(_conversation(role, [_Part(type="text", text=PROBE)]), tokens, limit),
            )
            if not any(found):  # the template rejects the conversation, or omits this role's content
                found = Forms(True, False) if role == "user" else self.forms("user", tokens, limit)
            self._forms[role] = found
        return self._forms[role]

    def _shows(self, messages: list[Message], tokens: dict[str, Any], limit: int) -> bool:
        with suppress(Exception):  # a template may raise anything
            return PROBE in self.render(messages, {**DEFAULTS, **tokens}, limit)
        return False


def _conversation(role: str, content: Any) -> list[Message]:
    """Return a short conversation with `content` in the role `role`."""
    ask, last = {"role": "user", "content": "1"}, {"role": role, "content": content}
    if role == "user":
        return [last]
    if role == "system":
        return [last, ask]
    if role == "assistant":
        return [ask, last]
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [ask, answer, {**last, "name": "f", "tool_call_id": call["id"]}]


def adapt_messages(template: Template, messages: list[Message], tokens: dict[str, Any], limit: int) -> list[Message]:
    """Return the messages with each content in a form that the template renders, unchanged if possible."""
    made = []
    for message in messages:
        content, forms = message["content"], template.forms(message["role"], tokens, limit)
        if isinstance(content, str) and forms.parts and not forms.text:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not forms.parts:
            content = "\n".join(part["text"] for part in content)
        made.append({**message, "content": content})
    return made


def render_prompt(request: dict[str, Any]) -> str:
    """Return the prompt. With `continue` it ends within the last message, as with continue_final_message.

    Raises RefusedError and the template's errors.
    """
    template, tokens, limit = compile_template(request["template"]), request["tokens"], request["limit"]
    messages = adapt_messages(template, request["messages"], tokens, limit)
    variables = {**DEFAULTS, **tokens, **request["variables"]}
    if not request["continue"]:
        return template.render(messages, variables, limit)
    content = messages[-1]["content"]
    if isinstance(content, list):
        if not content:
            raise RefusedError("continue_final_message: the last message has no text to continue")
        ending = content[-1]["text"]
        tagged: Any = [*content[:-1], {**content[-1], "text": ending + TAG}]
    else:
        ending, tagged = content, content + TAG
    text = template.render([*messages[:-1], {**messages[-1], "content": tagged}], variables, limit + len(TAG))
    place = text.rfind(TAG.strip())
    if place < 0 or ending.strip() not in text:
        raise RefusedError(
            "continue_final_message: the chat template drops the last message's text or parts of it, so that it cannot "
            "be continued; end the text elsewhere, or send it without continue_final_message"
        )
    kept = text[:place]
    # a template that strips contents removed the tag's space, and would have stripped the text
    return kept if text.startswith(TAG, place) else kept.rstrip()


@lru_cache(maxsize=KEPT_TEMPLATES)
def compile_template(source: str) -> Template:
    """Return the compiled template."""
    return Template(source)


def answer(line: str) -> dict[str, str]:
    """Return the answer to one line; never raises errors of a template or its variables."""
    try:
        text = render_prompt(json.loads(line))
        text.encode()  # raises for a lone surrogate
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except RefusedError as problem:
        return {"error": str(problem)}
    except UnicodeEncodeError:
        return {"error": "the rendered chat has a lone surrogate, which is not valid text"}
    except Exception as problem:  # the worker continues
        return {"error": f"{type(problem).__name__}: {problem}"[:500]}
    return {"text": text}


def main() -> None:
    """Answer requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)


if __name__ == "__main__":
    main()
