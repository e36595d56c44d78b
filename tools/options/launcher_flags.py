"""Flags of the launchers of vLLM, SGLang and LoRAX that are no flags here: renamed, translated, accepted without
effect, or refused with a remedy.

`runtime/engine` has the tables. A parser gets only the flags that its command line has.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from ...compiler.options import OptionError
from ...runtime.engine.flag_spelling import with_flags
from ...runtime.engine.launcher_flags import LauncherFlag, add_flag, read_flags, read_value
from ...runtime.engine.vllm_keywords import ACCEPTED, ANY, UNSUPPORTED_KEYWORDS, has_no_effect, speculation_of
from .config_file import ConfigParser

_PRECISIONS = {
    "dtype": {"auto": None, "bfloat16": "bf16", "float32": "fp32", "float": "fp32"},
    "quantization": {"fp8": "fp8", "none": None, "None": None},
}
"""Flag -> its value -> --precision; None leaves the precision as it is."""
_JSON_FLAGS = ("--speculative-config", "--override-generation-config", "--default-chat-template-kwargs")


@cache
def launcher_flags() -> tuple[dict[str, str], dict[str, LauncherFlag]]:
    """Return the renamed flags with their names here, and the unsupported flags."""
    renamed, others = read_flags()
    flags: dict[str, LauncherFlag] = {}
    for name, keyword in UNSUPPORTED_KEYWORDS.items():
        if name not in (*ACCEPTED, *_PRECISIONS):
            is_switch = any(isinstance(value, bool) for value in keyword.accepted)
            add_flag(flags, f"--{name.replace('_', '-')}", LauncherFlag(keyword, 0 if is_switch else None, True))
    return renamed, flags | others


def add_launcher_flags(parser: argparse.ArgumentParser) -> None:
    """Make a parser accept or explain other launchers' flags. Call it after all others are added."""
    parser.add_argument("--enable-lora", action="store_true", help=argparse.SUPPRESS)
    hidden = argparse.SUPPRESS
    parser.add_argument("--speculative-config", action=_SpeculativeConfig, default=hidden, help=hidden)
    for name in _PRECISIONS:
        parser.add_argument(f"--{name}", action=_Precision, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    if isinstance(parser, ConfigParser):
        parser.translate = partial(_translate, parser)


def _translate(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Return arguments with the names of renamed flags, and add the unsupported ones to `parser`."""
    renamed, flags = launcher_flags()
    found = []
    for argument in _with_json(arguments, parser):
        given, equals, value = argument.partition("=")
        name = f"--{given[2:].replace('_', '-')}" if given.startswith("--") else given
        if name in renamed:
            print(f"sidestream: {given} is {renamed[name]} here", file=sys.stderr)
            name = renamed[name]
        known = parser._option_string_actions
        base = name[:2] if name.startswith("-O") else name.partition(".")[0]  # -O3; --hf-overrides.rope.theta 5
        if base in flags and base not in known:
            dotted = [name] if name not in (base, "-O") and "." in name else []
            names = [*dotted, base] if base not in known else dotted
            parser.add_argument(
                *names,
                action=_unsupported(flags[base]),
                nargs=flags[base].nargs,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
        found.append(f"{name}{equals}{value}" if name in known else argument)
    return found


def _with_json(arguments: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return arguments with one JSON object for flags such as `--speculative-config.method ngram`, as in vLLM."""
    kept, objects, rest = list[str](), dict[str, dict[str, Any]](), iter(arguments)
    for argument in rest:
        given, equals, value = argument.partition("=")
        base, _, inside = given.partition(".")
        base = base.replace("_", "-")
        if not inside or base not in _JSON_FLAGS or base not in parser._option_string_actions:
            kept.append(argument)
            continue
        inner = objects.setdefault(base, {})
        *outer, last = inside.split(".")
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                parser.error(f"argument {given}: {key} has a value already")
        value = value if equals else next(rest, "--")
        if not equals and value.startswith("--"):
            parser.error(f"argument {given}: expected one argument")
        inner[last] = read_value(value)
    return kept + [word for flag, content in objects.items() for word in (flag, json.dumps(content))]


class _SpeculativeConfig(argparse.Action):
    """--speculative-config of the methods that are a --speculation."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        try:
            found = speculation_of(read_value(values))
        except OptionError as problem:
            reason = with_flags(str(problem), {each.dest for each in parser._actions})
            parser.error(f"--speculative-config {values}: {reason}")
        for name, value in found.items():
            setattr(namespace, name, value)


class _Precision(argparse.Action):
    """--dtype and --quantization with values that are a --precision."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        known = _PRECISIONS[self.dest]
        if values not in known:
            remedy = "use --precision int8, fp8, bf16 or fp32; weights are quantized while they are loaded"
            parser.error(f"--{self.dest} {values} is not supported; {remedy}")
        if known[values] is not None:
            namespace.precision = known[values]


def _unsupported(flag: LauncherFlag) -> type[argparse.Action]:
    """Return the action of one flag: it reports that it has no effect, or ends the command with the remedy."""

    class Action(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: Any,
            option_string: str | None = None,
        ) -> None:
            shown = option_string or self.option_strings[0]
            value = not shown.startswith("--no-") if self.nargs == 0 else _read_all(values)
            if self.nargs != 0:
                shown = " ".join([shown, *(values if isinstance(values, list) else [values])])
            options = {each.dest for each in parser._actions}
            remedy = with_flags(flag.unsupported.remedy, options) if flag.is_keyword else flag.unsupported.remedy
            if not has_no_effect(flag.unsupported, value):
                parser.error(f"{shown} is not supported; {remedy}")
            explains = not flag.is_keyword and (ANY in flag.unsupported.accepted or value is True)
            reason = remedy if explains else "it is so anyway"
            print(f"sidestream: {shown} has no effect: {reason}", file=sys.stderr)

    return Action


def _read_all(values: str | list[str]) -> Any:
    """Return the value of a flag; a list may be several words, or JSON in one word."""
    if isinstance(values, str):
        return read_value(values)
    read = [read_value(value) for value in values]
    return read[0] if len(read) == 1 and isinstance(read[0], list) else read
