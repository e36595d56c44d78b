"""Constraints on an answer: `StructuredOutputsParams`, with vLLM's names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from .checks import MAX_TOKENS, check_integer, check_text
from .errors import RequestError

MAX_CONSTRAINT_BYTES = 256 << 10
"""Of a schema, a grammar, a regular expression or all choices together, as UTF-8."""
MAX_NESTING = 64
MAX_CONSTRAINT_CHOICES = 4096
ReasoningStart = Literal["inside", "optional", "none"]
"""How an answer begins: inside the reasoning, with an optional <think>, or with content."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_REFUSED = {
    "structural_tag": "use grammar",
    "disable_additional_properties": "write additionalProperties: false into the schema",
}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One constraint on the answer; checked on construction, compiled when the request arrives.

    json          JSON schema, as a dict or JSON text; true: any JSON value
    regex         regular expression for the whole answer (Rust syntax: no look-around, no back references)
    choice        the answer is one of these strings
    grammar       context-free grammar in Lark or GBNF notation
    json_object   True: any JSON object
    disable_any_whitespace  no white space between JSON tokens
    whitespace_pattern      regular expression for the white space between JSON tokens
    reasoning     "inside": the constraint begins after </think>; "optional": the same if the answer begins with <think>
    reasoning_tokens  </think> is forced after so many tokens of reasoning; None: the model ends it

    Give exactly one of the first five. `disable_fallback` has no effect; other fields of vLLM are refused.

    Raises RequestError.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    reasoning: ReasoningStart = "none"
    reasoning_tokens: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if self._is_given(name)]
        for name, remedy in _REFUSED.items():
            if getattr(self, name) not in (None, False):
                raise RequestError(f"structured_outputs.{name} is not supported; {remedy}")
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}; this has {', '.join(given) or 'none'}"
            )
        for name in ("json_object", "disable_fallback", "disable_any_whitespace"):
            if getattr(self, name) not in (None, True, False):
                raise RequestError(f"structured_outputs.{name}={getattr(self, name)!r} must be True or False")
        if self.reasoning not in get_args(ReasoningStart):
            raise RequestError(
                f"structured_outputs.reasoning={self.reasoning!r} must be one of {', '.join(get_args(ReasoningStart))}"
            )
        if self.reasoning_tokens is not None:
            check_integer("structured_outputs.reasoning_tokens", self.reasoning_tokens, 0, MAX_TOKENS)
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(f"structured_outputs.{name} must be a non-empty text")
        if self.json is not None:
            object.__setattr__(self, "json", _as_schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _as_choices(self.choice))
        if self.json is None and self.json_object is not True:
            for name in ("disable_any_whitespace", "whitespace_pattern"):
                if getattr(self, name):
                    raise RequestError(f"structured_outputs.{name} needs json or json_object; leave it out")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError("structured_outputs.whitespace_pattern contradicts disable_any_whitespace")
        size = len(self.text.encode("utf-8", "surrogatepass")) + len(self.whitespace_pattern or "")
        if size > MAX_CONSTRAINT_BYTES:
            raise RequestError(
                f"structured_outputs.{self.kind} has {size} bytes; at most {MAX_CONSTRAINT_BYTES} are allowed"
            )

    def check_text(self) -> None:
        """Raise RequestError for a constraint with half of a surrogate pair, which no answer can contain."""
        text = self.text
        if self.json is not None and "\\u" in text:  # an escape such as \ud83d is ASCII in a schema's text
            text = json.dumps(json.loads(text), ensure_ascii=False)
        for place, each in enumerate(self.choice or ()):
            check_text(f"structured_outputs.choice[{place}]", each)
        check_text(f"structured_outputs.{self.kind}", text)
        check_text("structured_outputs.whitespace_pattern", self.whitespace_pattern or "")

    @property
    def kind(self) -> str:
        """Name of the given constraint."""
        return next(name for name in _KINDS if self._is_given(name))

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and (name == "json" or value is not False)

    @property
    def text(self) -> str:
        """The constraint as text: the schema as JSON, the choices as a JSON list."""
        if self.choice is not None:
            return json.dumps(self.choice, ensure_ascii=False)
        if self.json_object:
            return '{"type": "object"}'
        return cast(str, self.json or self.regex or self.grammar)


def _as_schema_text(schema: Any) -> str:
    """Return a schema as JSON text, `true` (any JSON value) as `{}`; the compiler checks `$ref` and keywords."""
    try:
        if isinstance(schema, str):
            if len(schema) > MAX_CONSTRAINT_BYTES:
                return schema  # its size is refused
            text, schema = schema, json.loads(schema)
        else:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise RequestError(f"structured_outputs.json is nested deeper than {MAX_NESTING} levels") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured_outputs.json is not JSON: {str(error)[:200]}") from None
    if schema is True:
        return "{}"
    if schema is False:
        raise RequestError("structured_outputs.json is false, which no answer matches; true and {} allow any JSON")
    if not isinstance(schema, dict):
        raise RequestError(f"structured_outputs.json must be a JSON schema, not a {type(schema).__name__}")
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        level = [
            child
            for entry in level
            if isinstance(entry, (dict, list))
            for child in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not level:
            return text
    raise RequestError(f"structured_outputs.json is nested deeper than {MAX_NESTING} levels; define parts in $defs")


def _as_choices(choices: Any) -> tuple[str, ...]:
    if not isinstance(choices, Sequence) or isinstance(choices, (str, bytes)) or not choices:
        raise RequestError("structured_outputs.choice must be a list of strings with at least one entry")
    if len(choices) > MAX_CONSTRAINT_CHOICES:
        raise RequestError(
            f"structured_outputs.choice has {len(choices)} entries; at most {MAX_CONSTRAINT_CHOICES} are allowed"
        )
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise RequestError(f"structured_outputs.choice holds {str(choice)[:40]!r}; each must be a non-empty text")
    return tuple(choices)
