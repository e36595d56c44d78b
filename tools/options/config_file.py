"""`--config file.toml`: flags of a command as keys of a TOML file."""

import argparse
import difflib
import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GIVEN = "config_values"


class ConfigParser(argparse.ArgumentParser):
    """A parser that takes values of a `ConfigAction`'s file for flags that are not on the command line.

    translate   rewrites arguments before they are parsed
    """

    translate: Callable[[Sequence[str]], list[str]] = list

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; a flag on the command line wins over the file, even with its default value."""
        args = self.translate(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(args, namespace)
        values: dict[str, Any] = vars(found).pop(GIVEN, {})
        if values:
            untouched = _Untouched()
            again, _ = super().parse_known_args(
                args, argparse.Namespace(**{action.dest: untouched for action in self._actions})
            )
            for action in self._actions:
                value = getattr(again, action.dest, None)
                # an omitted positional is set to its default
                left_alone = value is untouched or (not action.option_strings and value is action.default)
                if action.dest in values and left_alone:
                    setattr(found, action.dest, values[action.dest])
        return found, rest


class _Untouched(list[Any]):
    """Marks a flag that was not given; a list, since flags that collect values append to a copy of it."""


class ConfigAction(argparse.Action):
    """Reads flags from a TOML file: `max-num-seqs = 64`, `enforce-eager = true`, `disable-pass = ["a", "b"]`.

    NAME=VALUE flags are a table: `[lora-modules]` with `sql = "adapters/sql"`.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Report an unreadable file, an unknown key or a wrong value through parser.error."""
        setattr(namespace, self.dest, values)
        try:
            content = tomllib.loads(Path(values).read_text(encoding="utf-8"))
        except OSError as error:
            parser.error(f"{values}: {error.strerror}; name a TOML file of flags")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            parser.error(f"{values} is not a TOML file: {error}")
        flags = _flags(parser, skip=self)
        given: dict[str, Any] = {}
        for key, value in content.items():
            name = key.replace("_", "-")
            if name not in flags and isinstance(parser, ConfigParser):
                (name,) = (flag[2:] for flag in parser.translate([f"--{name}"]))
                flags = _flags(parser, skip=self)
            if name not in flags:
                near = difflib.get_close_matches(name, flags, 1)
                parser.error(
                    f"{values}: {key} is not a flag of this command" + (f"; did you mean {near[0]}?" if near else "")
                )
            action = flags[name]
            if action.option_strings and action.default is argparse.SUPPRESS:  # it checks a value, or sets another flag
                given |= _set_by(parser, action, name, value)
                continue
            given[action.dest] = _value(parser, action, f"{values}: {key}", value)
        setattr(namespace, GIVEN, given)


def _flags(parser: argparse.ArgumentParser, skip: argparse.Action) -> dict[str, argparse.Action]:
    """Return name without dashes -> action."""
    flags: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action is skip or isinstance(action, argparse._HelpAction):
            continue
        names = [option[2:] for option in action.option_strings if option.startswith("--")] or [action.dest]
        flags.update(dict.fromkeys(names, action))
    return flags


def _set_by(parser: argparse.ArgumentParser, action: argparse.Action, name: str, value: Any) -> dict[str, Any]:
    """Return the values that a flag sets under other names."""
    found = argparse.Namespace()
    if action.nargs == 0:
        action(parser, found, [], f"--{name}" if value is not False else f"--no-{name}")
    else:
        words = [each if isinstance(each, str) else json.dumps(each) for each in _listed(value)]
        action(parser, found, words if action.nargs == "+" else words[0], f"--{name}")
    return vars(found)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _value(parser: argparse.ArgumentParser, action: argparse.Action, where: str, value: Any) -> Any:
    if action.nargs == 0:
        if not isinstance(value, bool):
            parser.error(f"{where} must be true or false")
        return value
    if isinstance(value, dict):
        return _several(parser, action, where, [f"{name}={entry}" for name, entry in value.items()])
    several = action.nargs in ("+", "*") or type(action).__name__ == "_AppendAction"
    if several:
        return _several(parser, action, where, _listed(value))
    return _one(parser, action, where, value)


def _several(parser: argparse.ArgumentParser, action: argparse.Action, where: str, entries: list[Any]) -> list[Any]:
    return [one for entry in entries for one in _listed(_one(parser, action, where, entry))]


def _one(parser: argparse.ArgumentParser, action: argparse.Action, where: str, value: Any) -> Any:
    """Return one value, converted and checked as on the command line."""
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
