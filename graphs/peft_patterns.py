"""How PEFT matches module names, for rank_pattern, alpha_pattern, target_modules and exclude_modules (peft.utils.other,
peft.tuners.tuners_utils).

The patterns come from a file that somebody else wrote, and Python's `re` can be made to run for hours: patterns that
nest repeats are refused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]  # the only faithful reading of a pattern; there since Python 3.11
from typing import Any

MAX_PATTERN_LENGTH = 4096
MAX_REPEATS = 6
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)
ALL_LINEAR = "all-linear"


class PatternError(ValueError):
    """A pattern that cannot be used, with the reason."""


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """re.compile after refusing patterns whose matching time explodes. Raises PatternError."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise PatternError(
            f"a pattern of {len(pattern)} characters is longer than {MAX_PATTERN_LENGTH}: list the modules by name"
        )
    try:
        compiled = re.compile(pattern)
        _repeats(_parser.parse(pattern))
    except PatternError as problem:
        raise PatternError(
            f"pattern {_short(pattern)} has {problem}, which can take hours to match: list the modules by name"
        ) from None
    except (re.error, RecursionError, OverflowError) as problem:
        raise PatternError(
            f"pattern {_short(pattern)} is not a regular expression ({problem}): list the modules by name"
        ) from None
    return compiled


def first_match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches a dotted suffix of `module`, in the order of the file; else
    `default`.
    """
    for pattern, value in patterns.items():
        if compile_pattern(rf"(.*\.)?({pattern})$").match(module):
            return value
    return default


def targeted(module: str, target_modules: Any, exclude_modules: Any, layers: Any, layers_pattern: Any) -> bool:
    """Whether an adapter_config.json applies LoRA to `module`, a projection of a Llama layer."""
    if exclude_modules and _named(module, exclude_modules):
        return False
    if isinstance(target_modules, str):
        return target_modules.lower() == ALL_LINEAR or _named(module, target_modules)
    if module in target_modules:
        return True
    if not _named(module, target_modules):
        return False
    if layers is None or layers == []:
        return True
    index = _layer_index(module, layers_pattern)
    return index is not None and index in ([layers] if isinstance(layers, int) else layers)


def _named(module: str, names: str | Iterable[str]) -> bool:
    if isinstance(names, str):
        return compile_pattern(names).fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _layer_index(module: str, layers_pattern: Any) -> int | None:
    if not layers_pattern:
        found = re.match(r".*?\.[^.]*\.(?P<index>\d+)\.", module)
        return int(found["index"]) if found else None
    for pattern in [layers_pattern] if isinstance(layers_pattern, str) else layers_pattern:
        found = compile_pattern(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.").match(module)
        if found:
            return int(found["index"])
    return None


def _repeats(parsed: Any) -> int:
    """How many repeats a name may have to be split between: those of a sequence add up, of alternatives the most count.

    Raises on a repeat in a repeat.
    """
    total = 0
    for operation, argument in parsed:
        if operation in _REPEATS:
            _, most, body = argument
            if most > 1:
                if _repeats(body) or any(inner is _parser.BRANCH for inner, _ in _flatten(body)):
                    raise PatternError("a repeat inside a repeat")
                total += 1
            else:
                total += _repeats(body)
        elif operation is _parser.BRANCH:
            total += max(_repeats(branch) for branch in argument[1])
        else:
            total += sum(_repeats(body) for body in _bodies(argument))
    if total > MAX_REPEATS:
        raise PatternError(f"more than {MAX_REPEATS} repeats")
    return total


def _bodies(argument: Any) -> Iterator[Any]:
    """The sub-patterns inside one parsed operation's argument (groups, look-arounds, conditionals)."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            yield from _bodies(part)


def _flatten(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """Every operation of a parsed pattern, at any depth."""
    for operation, argument in parsed:
        yield operation, argument
        for body in _bodies(argument):
            yield from _flatten(body)


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")
