"""A constraint that somebody else wrote is compiled in a child process first: what takes too long, or too much memory,
or ends the process, does so there.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from ...api.errors import RequestError
from ...processes.helper_process import ChildProcess

TRIAL_SECONDS = 3.0
TRIAL_STEPS = 32
STEP_SECONDS = 0.25
MAX_GRAMMAR_BYTES = 8 << 20
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}
"""Of llguidance's own limits those that differ from its defaults."""
MAX_REASON = 400
_CANNOT = "cannot be used:"
_STATE = "<non-verbose/>"
"""Stands at the end of an error where llguidance would print its state without `verbose_errors`."""
_WORDS = {
    "NoExtensionBias": "no text fits it (is there a rule or a $ref that leads to nothing but itself?)",
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "Use anyOf in its place",
    "no start rule found": "no start rule found; a Lark grammar needs a rule `start: ...`, GBNF a rule `root ::= ...`",
    "Unimplemented keys:": "Unimplemented keys, leave them out:",
}
"""llguidance's words -> ours, where its own name no remedy that there is."""


class Trial:
    """The child process, started by the first use. Not thread-safe."""

    def __init__(self) -> None:
        # -P keeps this folder, whose module names are ours, off the child's path
        worker = Path(__file__).with_name("trial_worker.py")
        self._child = ChildProcess([sys.executable, "-P", str(worker)], MAX_GRAMMAR_BYTES)

    def grammar(self, kind: str, text: str, options: dict[str, Any]) -> str:
        """llguidance's form of a constraint (`kind`: json, regex or grammar) that was compiled and took some steps.

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
    """Return the error for a constraint that cannot be used, with llguidance's reason in our users' words."""
    lines = [line.strip() for line in reason.replace(_STATE, "").splitlines()]
    text = "; ".join(line for line in lines if line.strip("^")).replace(":; ", ": ")
    for words, plain in _WORDS.items():
        text = text.replace(words, plain)
    return f"structured_outputs.{kind} {_CANNOT} {text[:MAX_REASON]}{'...' if len(text) > MAX_REASON else ''}"


def is_refusal(text: str) -> bool:
    """Return whether a request's error is a `refusal`: its constraint is at fault, not the engine."""
    return re.match(rf"structured_outputs\.\w+ {_CANNOT}", text) is not None
