"""Explains a body that could not be decoded: which field is wrong, what is allowed, and what to do."""

import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect

from ...api.checks import check_text
from ...api.errors import RequestError, some_of
from ..interfaces import GatewayError

MAX_SEARCHED_BYTES = 1 << 20
"""Size of bodies that are searched for the field with a lone surrogate."""
MAX_SEARCHED_ENTRIES = 1024
"""Entries of an object that are searched for the invalid one."""
MAX_SHOWN_CHARACTERS = 60
_ANY_KEY = "[...]"
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]{0,200})`$")
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)")
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}
_TEXT_ONLY = "the model reads text only"
_MEDIA = (
    "image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "input_file", "document",
)  # fmt: skip
_REMEDIES = {
    **{("type", kind): _TEXT_ONLY for kind in _MEDIA},
}
"""(field name, invalid value) -> what to do instead."""
_PAIRS = (
    "text_1", "text_2", "data_1", "data_2", "queries", "query", "documents", "items", "label_token_ids", "activation",
    "use_activation", "apply_softmax", "item_first", "encoding_format", "truncate_prompt_tokens",
)  # fmt: skip
"""Fields of bodies for cross-encoders, whose servers have /v1/score too."""
_NO_PAIRS = (
    "no reranker is served here: /v1/score returns log-probabilities of token ids; for pairs of texts use a server of "
    "a cross-encoder"
)
_PATTERNS = {
    "^[A-Za-z0-9_.-]+$": "must have letters, digits, '.', '_' and '-' only",
    "^[A-Za-z0-9._-]+$": "must have letters, digits, '.', '_' and '-' only",
    r"^[^\x00]*$": "must be a path without zero bytes",
}
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "stop_sequences": "stop",
    "inputs": "prompt",
    "replace": "load_inplace",
    "adapter": "model",
    "adapter_id": "model",
    "lora": "model",
}
"""Field names of other servers -> this server's names."""


def malformed(problem: Exception, data: bytes, shape: type) -> GatewayError:
    """Return the error for a body that could not be decoded as `shape` or as UTF-8."""
    if isinstance(problem, RecursionError):
        return GatewayError(400, "the body is nested too deeply")
    if not data.strip():
        return GatewayError(400, f"the body is empty; send a JSON object{_example(shape)}")
    if isinstance(problem, UnicodeDecodeError):
        return GatewayError(400, "the body is not valid UTF-8; encode it as UTF-8")
    text = str(problem)
    found = _PATH.search(text)
    path, text = ("" if found is None else found[1]), _PATH.sub("", text)
    if not isinstance(problem, msgspec.ValidationError):
        return _invalid_json(text, data)
    missing = re.search(r"missing required field `([^`]{1,200})`", text)
    if missing is not None:
        where = f"{path}.{missing[1]}" if path else missing[1]
        return GatewayError(400, f"{where} is missing; add it", param=where[:128])
    unknown = re.search(r"unknown field `([^`]{1,200})`", text)
    if unknown is not None:
        where = f"{path}.{unknown[1]}" if path else unknown[1]
        scores = not path and unknown[1] in _PAIRS and any(each.name == "sequences" for each in _root(shape).fields)
        advice = _NO_PAIRS if scores else _advice(unknown[1], shape, path)
        return GatewayError(400, _printable(f"there is no field `{where}`; {advice}"), param=_printable(where)[:128])
    if not path:
        return GatewayError(400, f"the body must be a JSON object{_example(shape)}, not {_kind(data)}")
    value = _value_at(data, path)
    if found is not None and "`key` in" in found[0] and isinstance(value, dict):
        keys = [repr(key[:40]) for key, _ in _invalid_entries(value, path, f"`key` in `$.{path}`", shape)]
        wrong = some_of(keys) if keys else "them"
        return GatewayError(
            400, _printable(f"{path}: each key {_requirement(text, shape, path)}; change {wrong}"), param=path
        )
    named = path
    if path.endswith(_ANY_KEY):  # msgspec does not report the key
        field = path.removesuffix(_ANY_KEY)
        entry = next(_invalid_entries(_value_at(data, field), field, f"`$.{path}`", shape), None)
        if entry is not None:
            named, value = f"{field}[{_shorten(entry[0])}]", entry[1]
    shown = "" if isinstance(value, (dict, list)) or value is ... else f"={_shorten(value)}"
    remedy = _REMEDIES.get((path.rpartition(".")[2], value)) if isinstance(value, str) else None
    advice = f"; {remedy}" if remedy else ""
    return GatewayError(400, _printable(f"{named}{shown} {_requirement(text, shape, path)}{advice}"), param=path[:128])


def _advice(unknown: str, shape: type, path: str) -> str:
    """Return what to do about an unknown field of the object at `path`."""
    known = sorted({each.name for struct in _structs_at(shape, path) for each in struct.fields})
    for name in known:
        inner = f"{path}.{name}" if path else name
        if path and any(each.name == unknown for struct in _structs_at(shape, inner) for each in struct.fields):
            return f"put it into `{inner}`"
    near = _OTHER_NAMES.get(unknown)
    close = [near] if near in known else difflib.get_close_matches(unknown, known, 1)
    return f"did you mean `{close[0]}`?" if close else "leave it out"


def _invalid_json(text: str, data: bytes) -> GatewayError:
    """Return the error for a body that is not JSON, or has a lone surrogate in a string."""
    cut = "truncated" in text  # msgspec also reports a lone surrogate at the end of a body as truncated
    where = _surrogate(data) if ("surrogate" in text or cut) and len(data) <= MAX_SEARCHED_BYTES else None
    if "surrogate" in text or where is not None:
        name = where or "a string of the body"
        advice = "send both halves of the pair, or replace it by '?' or U+FFFD"
        text = _printable(f"{name} holds a lone surrogate, which is no text; {advice}")
        return GatewayError(400, text, param=None if where is None else _printable(where)[:128])
    if cut:
        return GatewayError(400, "the body ends in the middle of its JSON; send all of it")
    return GatewayError(400, _printable(f"the body is not JSON: {text.removeprefix('JSON is malformed: ')}"))


def _surrogate(data: bytes) -> str | None:
    """Return the path of the first string with a lone surrogate."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return next(_surrogates(body, ""), None)


def _surrogates(value: Any, path: str, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        try:
            check_text(path, value)
        except RequestError:
            yield path
    elif depth < 32 and isinstance(value, dict):
        for name, each in value.items():
            yield from _surrogates(each, f"{path}.{name}" if path else name, depth + 1)
    elif depth < 32 and isinstance(value, list):
        for index, each in enumerate(value):
            yield from _surrogates(each, f"{path}[{index}]", depth + 1)


def _value_at(data: bytes, path: str) -> Any:
    """Return the value at a path of msgspec; `...` if it cannot be found."""
    try:
        value = msgspec.json.decode(data)
        for index, name in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (LookupError, ValueError, TypeError, RecursionError):
        return ...
    return value


def _invalid_entries(entries: Any, field: str, place: str, shape: type) -> Iterator[tuple[str, Any]]:
    """Yield the entries of an object of the body that msgspec refuses at `place`."""
    for key, value in islice(entries.items(), MAX_SEARCHED_ENTRIES) if isinstance(entries, dict) else ():
        try:
            msgspec.convert({field: {key: value}}, shape, str_keys=True)
        except msgspec.ValidationError as problem:
            if str(problem).endswith(f" - at {place}"):
                yield key, value


def _requirement(text: str, shape: type, path: str) -> str:
    """Return the requirement on the value at `path`, from msgspec's message."""
    choices = _choices_at(shape, path)
    if ("enum value" in text or "Invalid value" in text) and choices:
        return f"must be {' or '.join(map(repr, choices))}"
    pattern = re.search(r"matching regex '(.*)'", text)
    if pattern is not None:
        return _PATTERNS.get(pattern[1], f"must match {pattern[1]}")
    size = re.fullmatch(r"Expected `(str|array|object)` of length (>=|<=) (\d+)", text)
    if size is not None:
        parts = {"str": "characters", "array": "entries", "object": "entries"}[size[1]]
        if (size[2], size[3]) == (">=", "1"):
            return "must not be empty"
        return f"must have {'at least' if size[2] == '>=' else 'at most'} {size[3]} {parts}"
    bound = re.fullmatch(r"Expected `(int|float)` (>=|<=|>|<) (\S+)", text)
    if bound is not None:
        return f"must be {_KINDS[bound[1]]} {_BOUNDS[bound[2]]} {bound[3].removesuffix('.0')}"
    kinds = re.fullmatch(r"Expected `([a-z |]+)`, got `([a-z]+)`", text)
    if kinds is not None:
        named = [_KINDS.get(kind, kind) for kind in kinds[1].split(" | ")]
        return f"must be {' or '.join(named)}, not {_KINDS.get(kinds[2], kinds[2])}"
    return f"cannot be used: {text}"


def _example(shape: type) -> str:
    """Return the required fields of a body as text."""
    needed = [each.name for each in _root(shape).fields if each.required]
    return f" with {' and '.join(f'`{name}`' for name in needed)}" if needed else ""


def _kind(data: bytes) -> str:
    first = data.lstrip()[:1].decode(errors="replace")
    return {"[": "a list", '"': "a string", "n": "null", "t": "true", "f": "false"}.get(first, "a number")


@cache
def _root(shape: type) -> inspect.StructType:
    found = inspect.type_info(shape)
    assert isinstance(found, inspect.StructType)  # bodies are structs
    return found


def _types_at(shape: type, path: str) -> list[inspect.Type]:
    """Return the types that the value at `path` may have, with unions flattened."""
    found: list[inspect.Type] = [_root(shape)]
    for index, name in _STEP.findall(path):
        inner: list[inspect.Type] = []
        for each in found:
            if index and isinstance(each, inspect.CollectionType):
                inner.append(each.item_type)
            elif name and isinstance(each, inspect.StructType):
                inner += [field.type for field in each.fields if field.encode_name == name]
            elif isinstance(each, inspect.DictType):
                inner.append(each.value_type)
        found = [part for each in inner for part in _flatten(each)]
    return found


def _flatten(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _flatten(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _flatten(each)
    else:
        yield kind


def _structs_at(shape: type, path: str) -> list[inspect.StructType]:
    return [each for each in _types_at(shape, path) if isinstance(each, inspect.StructType)]


def _choices_at(shape: type, path: str) -> list[Any]:
    values = [
        value for each in _types_at(shape, path) if isinstance(each, inspect.LiteralType) for value in each.values
    ]
    parent, _, last = path.rpartition(".")
    return values or [each.tag for each in _structs_at(shape, parent) if each.tag_field == last]


def _shorten(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:400])
