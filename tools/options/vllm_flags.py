"""Flags of `vllm serve` that are no flags here: mapped, accepted without effect, or refused with a remedy.

Their table, with the keywords of `LLM`, is in `runtime/engine/vllm_keywords.py`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ...runtime.engine.flag_spelling import with_flags
from ...runtime.engine.vllm_keywords import (
    ACCEPTED,
    UNSUPPORTED_FLAGS,
    UNSUPPORTED_KEYWORDS,
    Unsupported,
    has_no_effect,
)

_PRECISIONS = {
    "dtype": {"auto": None, "bfloat16": "bf16", "float32": "fp32", "float": "fp32"},
    "quantization": {"fp8": "fp8", "none": None, "None": None},
}
"""Flag -> its value -> --precision; None leaves the precision as it is."""


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags that `parser` does not have. Call it after all others are added."""
    parser.add_argument("--enable-lora", action="store_true", help=argparse.SUPPRESS)
    for name in _PRECISIONS:
        parser.add_argument(_flag(name), action=_Precision, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name, foreign in {**UNSUPPORTED_KEYWORDS, **UNSUPPORTED_FLAGS}.items():
        taken = parser._option_string_actions
        switch = any(isinstance(value, bool) for value in foreign.accepted)
        flags = [flag for flag in (_flag(name), f"--no-{_flag(name)[2:]}") if flag not in taken]
        if _flag(name) in flags and name not in (*ACCEPTED, *_PRECISIONS):
            kept = flags if switch else flags[:1]
            parser.add_argument(
                *kept,
                action=_foreign(name, foreign),
                nargs=0 if switch else None,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Precision(argparse.Action):
    """--dtype and --quantization with values that are a --precision."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        name, known = self.dest, _PRECISIONS[self.dest]
        if values not in known:
            remedy = "use --precision int8, fp8, bf16 or fp32; weights are quantized while they are loaded"
            parser.error(f"{_flag(name)} {values} is not supported; {remedy}")
        if known[values] is not None:
            namespace.precision = known[values]


def _foreign(name: str, foreign: Unsupported) -> type[argparse.Action]:
    """Return the action of one flag: it reports that it has no effect, or ends the command with the remedy."""

    class Action(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[Any] | None,
            option_string: str | None = None,
        ) -> None:
            shown = option_string or _flag(name)
            value = not shown.startswith("--no-") if self.nargs == 0 else _read(str(values))
            if self.nargs != 0:
                shown = f"{shown} {values}"
            options = {each.dest for each in parser._actions}
            if not has_no_effect(foreign, value):
                parser.error(f"{shown} is not supported; {with_flags(foreign.remedy, options)}")
            reason = foreign.remedy if name in UNSUPPORTED_FLAGS else "it is so anyway"
            print(f"sidestream: {shown} has no effect: {with_flags(reason, options)}", file=sys.stderr)

    return Action


def _read(text: str) -> Any:
    """Return a flag's value as a Python value."""
    try:
        return json.loads(text)
    except ValueError:
        return text
