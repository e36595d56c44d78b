"""A constraint that somebody else wrote is compiled in a child process first: what takes too long, or too much memory,
or ends the process, does so there.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ..child_process import ChildProcess
from ..requests.errors import RequestError

TRIAL_SECONDS = 3.0
TRIAL_STEPS = 32
STEP_SECONDS = 0.25
MAX_GRAMMAR_BYTES = 8 << 20
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}
"""Of llguidance's own limits those that differ from its defaults."""


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
    """What a client is told of a constraint that cannot be used; the reason without llguidance's state."""
    lines = [line.strip() for line in reason.partition("<")[0].splitlines() if line.strip()] or [reason.strip()]
    text = "; ".join(lines)
    return f"structured_outputs.{kind} cannot be used: {text[:400]}{'...' if len(text) > 400 else ''}"
