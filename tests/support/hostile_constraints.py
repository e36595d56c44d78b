"""Schemas, regular expressions and grammars that want to hurt: huge, recursive, ambiguous, catastrophic."""

import json
import random
from typing import Any

Constraint = dict[str, Any]


def _nest(depth: int, **more: Any) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, **more}
    return schema


def _either(number: int) -> Any:
    return {"anyOf": [{"properties": {f"{number} {branch}": {}}} for branch in range(2)]}


def _doubling(depth: int) -> str:
    return "start: a0 a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(depth)) + f'a{depth}: "x"'


def hostile(number: int) -> Constraint:
    """Constraint number `number`, of families in turn; those of a family grow with the number."""
    chance = random.Random(number)
    size = 1 + number // len(FAMILIES)
    return FAMILIES[number % len(FAMILIES)](chance, size)  # type: ignore[no-any-return, operator]


FAMILIES = (
    lambda chance, size: {"regex": "(a+)+" * size + "$"},
    lambda chance, size: {"regex": f"(.*{chance.choice('abc')}.{{{20 * size}}}b.{{{size}}}c|.*d.{{14}}e)*"},
    lambda chance, size: {"regex": "a{" + str(10 ** min(9, 3 + size)) + "}"},
    lambda chance, size: {"regex": "(" * (200 * size) + "a" + ")" * (200 * size)},
    lambda chance, size: {"regex": "((a{0,65535}){0,65535}){0," + str(size) + "}"},
    lambda chance, size: {"regex": chance.choice(["(?=a)", r"(a)\1", "[", "(?P<", "a{2,1}", "\\"]) * size},
    lambda chance, size: {"regex": "|".join(f".*x{n}.*y{n}" for n in range(60 * size))},
    lambda chance, size: {"json": {"type": "integer", "multipleOf": 999983 + 10 * size}},
    lambda chance, size: {
        "json": {"type": "string", "allOf": [{"pattern": f"a{n}.*b{n}"} for n in range(8 + 4 * size)]}
    },
    lambda chance, size: {"json": _nest(60 + size)},
    lambda chance, size: {"json": json.dumps({"$ref": "#"})},
    lambda chance, size: {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    lambda chance, size: {"json": {"allOf": [_either(n) for n in range(8 + size)]}},
    lambda chance, size: {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10 ** min(12, 4 + size)}},
    lambda chance, size: {"json": {"type": "string", "minLength": 10 ** min(12, 4 + size)}},
    lambda chance, size: {"json": {"enum": [f"value {n} {chance.random()}" for n in range(min(6000, 500 * size))]}},
    lambda chance, size: {"json": {"properties": {f"p{n}": {"pattern": f".*{n}.*"} for n in range(100 * size)}}},
    lambda chance, size: {"json": {"patternProperties": {f"^a{n}.*": {} for n in range(10 * size)}}},
    lambda chance, size: {"json": "{" * (1000 * size)},
    lambda chance, size: {"json": "[" * (90_000 + size)},
    lambda chance, size: {"json": {"description": "x" * 260_000}},
    lambda chance, size: {"grammar": "start: e\ne: " + "".join("e " * n + "| " for n in range(2, 3 + size)) + '"x"'},
    lambda chance, size: {"grammar": "start: a\n" + 'a: a a | "x" |'},
    lambda chance, size: {"grammar": _doubling(20 * size)},
    lambda chance, size: {"grammar": "start: T\nT: " + " & ".join(f"/(.*a.{{{n}}}b.*)/" for n in range(10 * size))},
    lambda chance, size: {"grammar": "start: b{1000000}\nb: c{100000}\nc: /.*/"},
    lambda chance, size: {"grammar": "start: " + "(" * 500 * size + '"a"' + ")" * 500 * size},
    lambda chance, size: {"grammar": chance.choice(["start: %json {", "root ::= root", "start: <|x|>", "\0"]) * size},
    lambda chance, size: {"choice": [f"{chance.random()}" * 3 for _ in range(min(4096, 400 * size))]},
    lambda chance, size: {"json_object": True, "whitespace_pattern": "(.|\\n)*" * size},
)  # fmt: skip
