"""Schemas that need no trial: of a few keywords, for each of which llguidance's work grows with the schema's size."""

import json
from typing import Any

_WORDS = frozenset({"title", "description", "default", "examples", "$schema", "$id", "$comment"})
_PLAIN = frozenset({"type", "required", "enum", "const", "format"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_TABLES = frozenset({"properties", "$defs", "definitions"})
_ALONE = frozenset({"$ref", "anyOf"})
"""Next to nothing but words and definitions: what stands next to them would be intersected with each branch."""
MAX_COUNT = 4096


def is_plain(text: str) -> bool:
    """Whether a schema, as checked JSON text, has none but these keywords."""
    left: list[Any] = [json.loads(text)]
    while left:
        schema = left.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            return False
        rest = schema.keys() - _WORDS - _TABLES.difference({"properties"})
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
            elif key not in _PLAIN and key not in _WORDS and key != "$ref":
                return False
    return True
