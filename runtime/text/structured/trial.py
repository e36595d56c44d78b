"""Trial compilation of untrusted constraints in a child process, with limits on time and memory.

`is_plain` detects schemas that need no trial: llguidance's work for their keywords grows with the schema's size.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from ...api.errors import RequestError
from ...processes.helper_process import HelperProcess

TRIAL_SECONDS = 3.0
TRIAL_STEPS = 32
STEP_SECONDS = 0.25
MAX_GRAMMAR_BYTES = 8 << 20
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # llguidance's limits other than its defaults
MAX_REASON = 400
_CANNOT = "cannot be used:"
_STATE = "<non-verbose/>"  # ends an error where llguidance would print its state with `verbose_errors`
_WORDS = {  # replacements of llguidance's texts that name no available remedy
    "NoExtensionBias": "no text fits it (is there a rule or a $ref that leads to nothing but itself?)",
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "Use anyOf in its place",
    "no start rule found": "no start rule found; a Lark grammar needs a rule `start: ...`, GBNF a rule `root ::= ...`",
    "Unimplemented keys:": "Unimplemented keys, leave them out:",
}


class Trial:
    """The child process, started at first use. Not thread-safe."""

    def __init__(self) -> None:
        # -P keeps this folder off the child's path: its module names would shadow others
        worker = Path(__file__).with_name("trial_process.py")
        self._child = HelperProcess([sys.executable, "-P", str(worker)], MAX_GRAMMAR_BYTES)

    def grammar(self, kind: str, text: str, options: dict[str, Any]) -> str:
        """Return llguidance's form of a constraint (`kind`: json, regex or grammar) after a trial with some steps.

        Raises RequestError with llguidance's reason.
        """
        asked = {
            "kind": kind,
            "text": text,
            "options": options,
            "limits": LIMITS,
            "steps": TRIAL_STEPS,
            "seconds": STEP_SECONDS,
        }
        try:
            answer = json.loads(self._child.ask(json.dumps(asked).encode() + b"\n", TRIAL_SECONDS))
        except TimeoutError:
            raise RequestError(refusal(kind, f"it takes more than {TRIAL_SECONDS:g} s to compile")) from None
        except (OSError, ValueError):
            raise RequestError(refusal(kind, "compiling it needs too much memory")) from None
        if "grammar" not in answer:
            raise RequestError(refusal(kind, answer["error"]))
        return str(answer["grammar"])

    def close(self) -> None:
        """End the child process."""
        self._child.close()


def refusal(kind: str, reason: str) -> str:
    """Return the error for an invalid constraint, with llguidance's reason in the terms of this API."""
    lines = [line.strip() for line in reason.replace(_STATE, "").splitlines()]
    text = "; ".join(line for line in lines if line.strip("^")).replace(":; ", ": ")
    for words, plain in _WORDS.items():
        text = text.replace(words, plain)
    return f"structured_outputs.{kind} {_CANNOT} {text[:MAX_REASON]}{'...' if len(text) > MAX_REASON else ''}"


def is_refusal(text: str) -> bool:
    """Return whether a request's error is a `refusal`: the constraint is invalid, not the engine."""
    return re.match(rf"structured_outputs\.\w+ {_CANNOT}", text) is not None


_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$schema", "$id", "$comment"})
_PLAIN = frozenset({"type", "required", "enum", "const", "format"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_TABLES = frozenset({"properties", "$defs", "definitions"})
_ALONE = frozenset({"$ref", "anyOf"})  # other keywords next to these would be intersected with each branch
MAX_COUNT = 4096


def is_plain(text: str) -> bool:
    """Return whether a schema, as checked JSON text, has only the keywords above."""
    left: list[Any] = [json.loads(text)]
    while left:
        schema = left.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            return False
        rest = schema.keys() - _ANNOTATIONS - _TABLES.difference({"properties"})
        if rest & _ALONE and len(rest) > 1:
            return False
        for key, value in schema.items():
            if key in _TABLES:
                if not isinstance(value, dict):
                    return False
                left += value.values()
            elif key in ("items", "additionalProperties"):
                left.append(value)
            elif key == "anyOf":
                if not isinstance(value, list):
                    return False
                left += value
            elif key in _COUNTS:
                if not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                    return False
            elif key in _BOUNDS:
                if not isinstance(value, (int, float)) or abs(value) > 2**53:
                    return False
            elif key not in _PLAIN and key not in _ANNOTATIONS and key != "$ref":
                return False
    return True
