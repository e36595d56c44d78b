"""Fields of config.json, each checked before it is used: an error names the field and says what to do about it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .regular_file import FileRefusedError, read_bounded

_MAX_CONFIG_BYTES = 1 << 20


class ConfigError(ValueError):
    """A config.json that cannot be served: says which field, and what to do about it."""


def read_json_object(
    path: Path,
    error: type[ValueError],
    missing_remedy: str,
    max_bytes: int = _MAX_CONFIG_BYTES,
    roots: Sequence[Path] | None = None,
    called: str | None = None,
) -> dict[str, Any]:
    """The JSON object in the regular file `path`, under one of `roots` if given; whatever is wrong with the file is
    raised as `error`, naming it (by its path, or as it is `called`) and none of its content.
    """
    name = called or path
    try:
        content = read_bounded(path, max_bytes, roots)
        value = {} if content is None else json.loads(content)
    except FileNotFoundError:
        raise error(f"{path} does not exist: {missing_remedy}") from None
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror}): check its permissions") from None
    except FileRefusedError as problem:
        raise error(f"{name} {problem}: put the file itself there") from None
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise error(f"{name} is not valid JSON: download or save it again") from None
    if content is None:
        raise error(f"{name} is larger than {max_bytes} bytes: it is not the file that it is named after")
    if not isinstance(value, dict):
        raise error(f"{name} does not hold a JSON object: download or save it again")
    return value


def integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer below 2**31; `default` where the field is missing or null. Raises ConfigError."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing from config.json: add it, or download the checkpoint again")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ConfigError(f"{name} must be a positive integer, not {value!r}: correct config.json")
    return value


def number(fields: Mapping[str, Any], name: str, default: float | None) -> float:
    """A positive number below 1e30; `default` where the field is missing or null. Raises ConfigError."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing from config.json: add it, or download the checkpoint again")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise ConfigError(f"{name} must be a positive number, not {value!r}: correct config.json")
    return float(value)


def token_ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The ids of a field that holds one token id or a list of them. Raises ConfigError."""
    value = fields[name]
    ids = value if isinstance(value, list) else [value]
    if not ids or any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise ConfigError(f"{name} must be a token id or a list of them, not {value!r}: correct config.json")
    return tuple(ids)


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """Whether a field is true; a field that is missing or null is false."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}: correct config.json")
    return bool(value)
