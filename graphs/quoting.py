"""What an error may say of a file that somebody else wrote: names that look like names, and values that are known words
or numbers. Everything else is described, so that no message carries a file's text to the asker.
"""

import re
from collections.abc import Collection

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,159}")
_LARGEST = 10**12


def name_of(text: str) -> str:
    """A field's or a tensor's name, quoted if it looks like one."""
    return repr(text) if _NAME.fullmatch(text) else f"(a name of {len(text)} characters)"


def value_of(value: object, known: Collection[str] = ()) -> str:
    """A field's value, if it is None, a number or one of the `known` words; else its kind."""
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < _LARGEST):
        return repr(value)
    if isinstance(value, str) and value in known:
        return repr(value)
    kinds = {str: "another string", list: "a list", dict: "an object", int: "a larger integer"}
    return kinds.get(type(value), "something else")
