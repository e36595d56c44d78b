"""PEFT's matching of module names, for rank_pattern, alpha_pattern, target_modules and exclude_modules.

The rules are those of peft.utils.other and peft.tuners.tuners_utils. Patterns are from untrusted files, and some make
Python's `re` run for hours while it holds the GIL. So RE2 matches them, in linear time. RE2 has no look-around and no
backreferences; on module names it agrees with `re` except for the syntax in `_OTHER_MEANING`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

MAX_PATTERNS = 1024
MAX_PATTERN_LENGTH = 2048
MAX_PROGRAM = 2048
"""Maximum instructions of one pattern compiled by RE2: a short pattern such as `x{1000}` can have many."""
MAX_PROGRAMS = 1 << 16
"""Maximum instructions of all patterns of one adapter."""
MEMORY = 1 << 20
ALL_LINEAR = "all-linear"
_OTHER_MEANING = ("{,", "[:", "\\Q", "\\C", "\\p", "\\P", "\\z", "\\x{")
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_REMEDY = "list the modules by name"


class PatternError(ValueError):
    """A pattern cannot be used; the message has the reason but not the pattern."""


class LookAroundError(PatternError):
    """A pattern has look-ahead or look-behind, which `re` supports and RE2 does not."""


class PeftPatterns:
    """The patterns of one adapter_config.json; each is compiled once, and their total size is limited."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, bool], Any] = {}
        self._instructions = 0

    def first_match(self, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        """Return the value of the first pattern that matches a dotted suffix of `module`, else `default`."""
        for pattern, value in patterns.items():
            if self.compile(rf"(.*\.)?({pattern})$").match(module):
                return value
        return default

    def targeted(
        self, module: str, target_modules: Any, exclude_modules: Any, layers: Any, layers_pattern: Any
    ) -> bool:
        """Return whether an adapter_config.json applies LoRA to `module`, a layer's projection. Raises PatternError."""
        if exclude_modules and self._named(module, exclude_modules):
            return False
        if isinstance(target_modules, str):
            return target_modules.lower() == ALL_LINEAR or self._named(module, target_modules)
        if module in target_modules:
            return True
        if not self._named(module, target_modules):
            return False
        if layers is None or layers == []:
            return True
        index = self._layer_index(module, layers_pattern)
        return index is not None and index in ([layers] if isinstance(layers, int) else layers)

    def compile(self, pattern: str, groups: bool = False) -> Any:
        """Return the pattern as an RE2 object with `match` and `fullmatch`; `groups`: keep its groups.

        Raises PatternError for syntax that RE2 does not support or that means something else in `re`, and for patterns
        that are too long or too many.
        """
        found = self._compiled.get((pattern, groups))
        if found is None:
            if len(self._compiled) >= MAX_PATTERNS:
                raise PatternError(f"more than {MAX_PATTERNS} patterns: {_REMEDY}")
            found = self._compiled[pattern, groups] = _compile(pattern, groups)
            self._instructions += found.programsize
            if self._instructions > MAX_PROGRAMS:
                raise PatternError(f"the patterns are too complex in total: {_REMEDY}")
        return found

    def _named(self, module: str, names: str | Collection[str]) -> bool:
        if isinstance(names, str):
            return self.compile(names).fullmatch(module) is not None
        return any(suffix in names for suffix in _suffixes(module))

    def _layer_index(self, module: str, layers_pattern: Any) -> int | None:
        if not layers_pattern:
            found = re.match(r".*?\.[^.]*\.(?P<index>\d+)\.", module)
            return int(found["index"]) if found else None
        patterns: Iterable[str] = [layers_pattern] if isinstance(layers_pattern, str) else layers_pattern
        for pattern in patterns:
            compiled = self.compile(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", groups=True)
            found = compiled.match(module)
            if found and found[compiled.groups] is not None:  # the last group is the index
                return int(found[compiled.groups])
        return None


def _suffixes(module: str) -> Iterator[str]:
    """Yield `a.b.c`, `b.c`, `c`."""
    yield module
    while "." in module:
        _, _, module = module.partition(".")
        yield module


def _compile(pattern: str, groups: bool) -> Any:
    try:
        import re2  # imported here: most adapters list their modules by name and do not need it
    except ImportError:
        raise PatternError(f"patterns need the package google-re2: install it, or {_REMEDY}") from None
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise PatternError(f"a pattern of more than {MAX_PATTERN_LENGTH} characters: {_REMEDY}")
    if not pattern.isascii() or not pattern.isprintable():
        raise PatternError(f"a pattern has characters that cannot be in a module's name: {_REMEDY}")
    if any(spelling in pattern for spelling in _LOOK_AROUND):
        raise LookAroundError(f"a pattern has look-ahead or look-behind, which is not supported: {_REMEDY}")
    if any(spelling in pattern for spelling in _OTHER_MEANING):
        raise PatternError(f"a pattern has one of {' '.join(_OTHER_MEANING)}, which are not supported: {_REMEDY}")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MEMORY
    options.never_capture = not groups
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as problem:
        raise PatternError(f"a pattern is not a supported expression ({_reason(problem)}): {_REMEDY}") from None
    if compiled.programsize > MAX_PROGRAM:
        raise PatternError(f"a pattern has too many repeats: {_REMEDY}")
    return compiled


def _reason(problem: Exception) -> str:
    """Return RE2's message without its quotation of the pattern."""
    text = problem.args[0] if problem.args else b""
    return str(text.decode("ascii", "replace") if isinstance(text, bytes) else text).partition(":")[0]
