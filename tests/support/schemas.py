"""JSON schemas of the families of JSONSchemaBench, rebuilt as data: what people send to servers.

`schema(family, seed)` makes one; names, sizes and shapes vary with the seed.
"""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = (  # noqa: SIM905
    "id name kind status city owner value count email label note start end size level score unit code"
).split()  # fmt: skip


def _names(chance: random.Random, count: int) -> list[str]:
    return chance.sample(WORDS, count)


def _text(chance: random.Random) -> Schema:
    return {"type": "string", "maxLength": chance.choice([3, 6, 10])}


def _leaf(chance: random.Random) -> Schema:
    low = chance.randint(-5, 5)
    return chance.choice(
        [
            _text(chance),
            {"type": "integer", "minimum": low, "maximum": low + chance.choice([3, 90])},
            {"type": "boolean"},
            {"enum": chance.sample(["on", "off", 1, 2.5, None, True], 3)},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
            {"const": chance.choice(["v1", 7, None])},
        ]
    )


def _object(chance: random.Random, count: int, leaf: Callable[[random.Random], Schema] = _leaf) -> Schema:
    names = _names(chance, count)
    return {
        "type": "object",
        "properties": {name: leaf(chance) for name in names},
        "required": names[: chance.randint(1, count)],
        "additionalProperties": False,
    }


def function_call(chance: random.Random) -> Schema:
    """Glaive: arguments of a function."""
    described = _object(chance, chance.randint(1, 4))
    for name, each in described["properties"].items():
        each["description"] = f"The {name}"
    return described


def nested(chance: random.Random) -> Schema:
    """GitHub: objects in objects, and lists of them."""
    inner = _object(chance, 2)
    outer = _object(chance, 2)
    outer["properties"]["items"] = {"type": "array", "items": inner, "minItems": chance.randint(0, 1), "maxItems": 2}
    outer["properties"]["nested"] = _object(chance, 2)
    outer["required"] = [*outer["required"], "items"]
    return outer


def kubernetes(chance: random.Random) -> Schema:
    """Definitions, maps of labels, and numbers that may be texts."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {
            "port": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 99}, {"type": "string", "maxLength": 4}]},
            "meta": {"type": "object", "properties": {"name": _text(chance)}, "required": ["name"],
                     "additionalProperties": False},
        },
        "type": "object",
        "properties": {
            "kind": {"enum": ["Pod", "Service"]},
            "metadata": {"$ref": "#/definitions/meta"},
            "ports": {"type": "array", "items": {"$ref": "#/definitions/port"}, "maxItems": chance.randint(1, 3)},
            _names(chance, 1)[0]: _leaf(chance),
        },
        "required": ["kind", "metadata"],
        "additionalProperties": False,
    }  # fmt: skip


def snowplow(chance: random.Random) -> Schema:
    """Events: formats, limits, texts that may be missing."""
    event = _object(chance, 2)
    event["properties"] |= {
        "at": {"type": "string", "format": chance.choice(["date-time", "date", "uuid", "ipv4"])},
        "page": {"type": ["string", "null"], "maxLength": 5},
    }
    event["required"] = [*event["required"], "at"]
    return event


def recursive(chance: random.Random) -> Schema:
    """Washington Post: content in content."""
    node = _object(chance, 1)
    node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def tagged(chance: random.Random) -> Schema:
    """One of several objects, told apart by a constant."""
    first, second = _names(chance, 2)
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"const": kind}, kind: _leaf(chance)},
                "required": ["type", kind],
                "additionalProperties": False,
            }
            for kind in (first, second)
        ]
    }


def numbers(chance: random.Random) -> Schema:
    """Bounds of every sort, and multiples."""
    low = chance.randint(-20, 20)
    return {
        "type": "array",
        "items": chance.choice(
            [
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + chance.randint(2, 50)},
                {"type": "integer", "multipleOf": chance.choice([2, 5, 12]), "minimum": 0, "maximum": 120},
                {"type": "number", "minimum": low, "maximum": low + 1, "multipleOf": 0.25},
            ]
        ),
        "minItems": 1,
        "maxItems": chance.randint(1, 4),
    }


def tuples(chance: random.Random) -> Schema:
    """Lists of which each place has a schema of its own."""
    places = [_leaf(chance) for _ in range(chance.randint(1, 3))]
    return {"type": "array", "prefixItems": places, "items": False, "minItems": len(places)}


def merged(chance: random.Random) -> Schema:
    """Parts that must hold together."""
    first, second = _names(chance, 2)
    return {
        "allOf": [
            {"type": "object", "properties": {first: _leaf(chance)}, "required": [first]},
            {"properties": {second: _text(chance)}, "required": [second]},
        ],
        "properties": {first: True, second: True},
        "additionalProperties": False,
    }


def patterns(chance: random.Random) -> Schema:
    """Texts that match regular expressions."""
    pattern = chance.choice(
        [r"^[A-Z]{2}-\d{1,4}$", r"^(red|green|blue)$", r"^\w{1,6}@[a-z]{1,4}\.(com|org)$", "^#[0-9a-f]{6}$"]
    )
    return _object(chance, chance.randint(1, 2), lambda chance: {"type": "string", "pattern": pattern})


FAMILIES = (
    function_call, nested, kubernetes, snowplow, recursive, tagged, numbers, tuples, merged, patterns,
)  # fmt: skip


def schema(family: Callable[[random.Random], Schema], seed: int) -> Schema:
    """The family's schema number `seed`."""
    return family(random.Random(f"{family.__name__} {seed}"))
