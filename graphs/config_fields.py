"""Checks of single fields of config.json; an error names the field and the remedy."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files.untrusted_files import LFS_POINTER, FileRefusedError, is_lfs_pointer, read_bounded

_MAX_CONFIG_BYTES = 1 << 20


class ConfigError(ValueError):
    """A model cannot be served, because of its config.json; the message names the field and the remedy."""


def read_json_object(
    path: Path,
    error: type[ValueError],
    missing_remedy: str,
    max_bytes: int = _MAX_CONFIG_BYTES,
    roots: Sequence[Path] | None = None,
    shown_name: str | None = None,
) -> dict[str, Any]:
    """Return the JSON object in the regular file `path`, under one of `roots` if given.

    Failures are raised as `error`. Messages have the file's path (or `shown_name`), but none of its content.
    """
    name = shown_name or path
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
        if is_lfs_pointer(path, roots):
            raise error(f"{name} {LFS_POINTER}") from None
        raise error(f"{name} is not valid JSON: download or save it again") from None
    if content is None:
        raise error(f"{name} is larger than {max_bytes} bytes, so it is another kind of file: download it again")
    if not isinstance(value, dict):
        raise error(f"{name} does not hold a JSON object: download or save it again")
    return value


def integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a positive integer below 2**31; `default` for a missing or null field. Raises ConfigError."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing from config.json: add it, or download the checkpoint again")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ConfigError(f"{name} must be a positive integer, not {value!r}: correct config.json")
    return value


def number(fields: Mapping[str, Any], name: str, default: float | None) -> float:
    """Return a positive number below 1e30; `default` for a missing or null field. Raises ConfigError."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing from config.json: add it, or download the checkpoint again")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise ConfigError(f"{name} must be a positive number, not {value!r}: correct config.json")
    return float(value)


def token_ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the ids of a field with one token id or a list of them. Raises ConfigError."""
    value = fields[name]
    ids = value if isinstance(value, list) else [value]
    if not ids or any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise ConfigError(f"{name} must be a token id or a list of them, not {value!r}: correct config.json")
    return tuple(ids)


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """Return whether a field is true; missing and null are false."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}: correct config.json")
    return bool(value)


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies; `kind` is "default" (none), "linear", "llama3", "longrope" or "yarn".

    low_freq_factor   (llama3, yarn) frequencies with fewer rotations than this within
                      `original_max_position_embeddings` are scaled
    high_freq_factor  (llama3, yarn) frequencies with more rotations are not scaled
    factors           (longrope) divisor of each frequency
    long_factors      (longrope) the same for contexts longer than `original_max_position_embeddings`
    attention_factor  (longrope, yarn) factor of rotated queries and keys
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    # not in the repr, which is part of a calibration's fingerprint: older calibrations stay valid
    factors: tuple[float, ...] = field(default=(), repr=False)
    long_factors: tuple[float, ...] = field(default=(), repr=False)
    attention_factor: float = field(default=1.0, repr=False)


def rotary_dim(fields: Mapping[str, Any], head_dim: int, partial: bool) -> int:
    """Return the number of dimensions of a head that RoPE rotates; all of them unless the family allows `partial`."""
    _, table = _rope_table(fields)
    factor = number(table if "partial_rotary_factor" in table else fields, "partial_rotary_factor", 1.0)
    rotated = int(head_dim * factor)
    if rotated == head_dim:
        return rotated
    if not partial:
        raise ConfigError("partial_rotary_factor is not supported for this family: use a checkpoint without it")
    if rotated % 2 or not 0 < rotated < head_dim:
        raise ConfigError(
            f"partial_rotary_factor {factor} gives {rotated} of {head_dim} dimensions: correct config.json"
        )
    return rotated


def _rope_table(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return (name, fields) of the object that describes RoPE."""
    source = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    table = fields.get(source) or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source} must be an object, not {table!r}: correct config.json")
    return source, table


def rope_scaling(fields: Mapping[str, Any], positions: int, rotated: int) -> tuple[float, RopeScaling]:
    """Return (theta, scaling) from transformers 5's `rope_parameters`, or from `rope_theta` and `rope_scaling`.

    `positions`: max_position_embeddings. `rotated`: number of rotated dimensions of a head.
    """
    source, table = _rope_table(fields)
    theta = number(fields if table.get("rope_theta") is None else table, "rope_theta", 10000.0)
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", factor=number(table, "factor", None))
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor=number(table, "factor", None),
            low_freq_factor=number(table, "low_freq_factor", None),
            high_freq_factor=number(table, "high_freq_factor", None),
            original_max_position_embeddings=integer(table, "original_max_position_embeddings", positions),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ConfigError(f"{source}: high_freq_factor must exceed low_freq_factor: correct config.json")
        return theta, scaling
    if kind in ("longrope", "su"):
        return theta, _longrope(source, table, fields, positions, rotated)
    if kind == "yarn":
        return theta, _yarn(source, table, positions)
    raise ConfigError(
        f"{source}: rope type {kind!r} is not supported, only 'default', 'linear', 'llama3', 'longrope' and 'yarn'; "
        + ("remove it to serve the original context length" if kind == "dynamic" else "use another checkpoint")
    )


def _longrope(
    source: str, table: Mapping[str, Any], fields: Mapping[str, Any], positions: int, rotated: int
) -> RopeScaling:
    """Return the scaling of longrope, computed as in transformers."""
    holder = table if table.get("original_max_position_embeddings") is not None else fields
    original = integer(holder, "original_max_position_embeddings", positions)
    factors, long_factors = (_factors(source, table, name, rotated // 2) for name in ("short_factor", "long_factor"))
    stretch = positions / original if table.get("factor") is None else number(table, "factor", None)
    attention = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    if table.get("attention_factor") is not None:
        attention = number(table, "attention_factor", None)
    return RopeScaling(
        "longrope",
        factor=stretch,
        original_max_position_embeddings=original,
        factors=factors,
        long_factors=long_factors,
        attention_factor=attention,
    )


def _yarn(source: str, table: Mapping[str, Any], positions: int) -> RopeScaling:
    """Return the scaling of YaRN, computed as in transformers."""
    if table.get("truncate", True) is not True:
        raise ConfigError(f"{source}: yarn with truncate=false is not supported: use another checkpoint")
    original = integer(table, "original_max_position_embeddings", positions)
    factor = number(table, "factor", positions / original)

    def attention(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    chosen = attention(1.0)
    if table.get("mscale") and table.get("mscale_all_dim"):
        chosen = attention(number(table, "mscale", None)) / attention(number(table, "mscale_all_dim", None))
    return RopeScaling(
        "yarn",
        factor=factor,
        low_freq_factor=number(table, "beta_slow", 1.0),
        high_freq_factor=number(table, "beta_fast", 32.0),
        original_max_position_embeddings=original,
        attention_factor=number(table, "attention_factor", chosen),
    )


def _factors(source: str, table: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    found = table.get(name)
    if not isinstance(found, list) or len(found) != count:
        raise ConfigError(f"{source}: longrope's {name} must hold {count} numbers: correct config.json")
    return tuple(number({name: factor}, name, None) for factor in found)
