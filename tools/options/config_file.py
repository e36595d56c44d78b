"""`--config file.toml`: every flag of a command as a key, so that a server can be started from a file that is kept
beside its unit.
"""

import argparse
import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GIVEN = "config_values"


class ConfigAction(argparse.Action):
    """Reads the flags that a TOML file gives; `apply` fills them in. Flags on the command line win over the file.

    `max-num-seqs = 64`, `enforce-eager = true`, `disable-pass = ["a", "b"]`, and a table for NAME=VALUE flags:
    `[lora-modules]` with `sql = "adapters/sql"`.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Raises through parser.error for a file that cannot be read, an unknown key, or a value that the flag would
        not take.
        """
        setattr(namespace, self.dest, values)
        try:
            content = tomllib.loads(Path(values).read_text(encoding="utf-8"))
        except OSError as error:
            parser.error(f"{values}: {error.strerror}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            parser.error(f"{values} is no TOML file: {error}")
        flags = _flags(parser, skip=self)
        given: dict[str, tuple[Any, Any]] = {}
        for key, value in content.items():
            name = key.replace("_", "-")
            if name not in flags:
                near = difflib.get_close_matches(name, flags, 1)
                parser.error(
                    f"{values}: {key} is not a flag of this command" + (f"; did you mean {near[0]}?" if near else "")
                )
            action = flags[name]
            given[action.dest] = action.default, _value(parser, action, f"{values}: {key}", value)
        setattr(namespace, GIVEN, given)


def apply(options: argparse.Namespace) -> None:
    """Fill in what the file gives for the flags that the command line left alone.

    To be called on the parsed options.
    """
    for dest, (default, value) in getattr(options, GIVEN, {}).items():
        if getattr(options, dest) == default:
            setattr(options, dest, value)


def _flags(parser: argparse.ArgumentParser, skip: argparse.Action) -> dict[str, argparse.Action]:
    """Name without dashes -> the action."""
    flags: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action is skip or isinstance(action, argparse._HelpAction):
            continue
        names = [option[2:] for option in action.option_strings if option.startswith("--")] or [action.dest]
        flags.update(dict.fromkeys(names, action))
    return flags


def _value(parser: argparse.ArgumentParser, action: argparse.Action, where: str, value: Any) -> Any:
    if action.nargs == 0:
        if not isinstance(value, bool):
            parser.error(f"{where} must be true or false")
        return value
    if isinstance(value, dict):
        return [_one(parser, action, where, f"{name}={entry}") for name, entry in value.items()]
    several = action.nargs in ("+", "*") or type(action).__name__ == "_AppendAction"
    if several:
        entries: Sequence[Any] = value if isinstance(value, list) else [value]
        return [_one(parser, action, where, entry) for entry in entries]
    return _one(parser, action, where, value)


def _one(parser: argparse.ArgumentParser, action: argparse.Action, where: str, value: Any) -> Any:
    """One value, converted and checked as the command line's would be."""
    if isinstance(value, (dict, list, bool)):
        parser.error(f"{where}: {value!r} is not what this flag takes")
    convert = action.type if callable(action.type) else str
    try:
        converted = convert(str(value))
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        parser.error(f"{where}: {error}")
    if action.choices is not None and converted not in action.choices:
        parser.error(f"{where}: {converted!r} is not one of {', '.join(map(str, action.choices))}")
    return converted
