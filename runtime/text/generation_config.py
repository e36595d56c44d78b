"""End-of-text tokens and sampling defaults from generation_config.json and related files."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...graphs.config_fields import ConfigError, read_json_object
from ..api.errors import RequestError
from ..api.sampling_defaults import FILE_FIELDS, SamplingDefaults, check_default
from .tokenizer import load_tokenizer

_log = logging.getLogger(__name__)
FILE = "generation_config.json"
AUTO, VLLM = "auto", "vllm"  # `generation_config` without a directory: the model's sampling defaults, or none
_AGAIN = "download or save it again"
_DEFAULT_EOS = "</s>"  # of transformers, for a tokenizer.model without a name in tokenizer_config.json


def sampling_defaults(
    directory: Path | None, source: str | Path = AUTO, override: Mapping[str, Any] = MappingProxyType({})
) -> SamplingDefaults:
    """Return the sampling defaults of a model's directory (None: none), as in vLLM.

    `do_sample` is ignored, and invalid values are dropped with a warning.

    source    the option `generation_config`: "auto", "vllm" or a directory
    override  the option `override_generation_config`: values in place of those of the file; None: the file's is dropped

    Raises ConfigError for a file that is not JSON, and for a directory in `source` without such a file.
    """
    found = {} if source == VLLM else _read(directory, source)
    given: dict[str, Any] = {}
    for name, ours in FILE_FIELDS.items():
        try:
            check_default(name, found.get(name))
            given[ours] = found.get(name)
        except RequestError as problem:
            _log.warning("%s: %s; the value is ignored", FILE, problem)
    return SamplingDefaults(**given | {FILE_FIELDS[name]: value for name, value in override.items()})


def describe(defaults: SamplingDefaults, override: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return a start-up line with the defaults, under their names in the file; "" without defaults."""
    given = defaults.given()
    named = ", ".join(f"{name} {given[ours]:g}" for name, ours in FILE_FIELDS.items() if ours in given)
    if override:
        return f"the sampling defaults are {named or 'unset'} ({FILE} with override_generation_config)"
    return named and f"{FILE} sets the sampling defaults {named} (generation_config 'vllm' takes none)"


def eos_token_ids(directory: Path | None, source: str | Path = AUTO) -> frozenset[int]:
    """Return the ids that end a text: `eos_token_id` of generation_config.json and config.json, and `eos_token`.

    source   as for `sampling_defaults`

    Raises ConfigError for a file that is not JSON.
    """
    values = [_read(directory, source).get("eos_token_id")]
    if directory is not None:
        values += [_optional(directory / "config.json").get("eos_token_id"), _eos_of_tokenizer(directory)]
    found = [token for value in values for token in (value if isinstance(value, list) else [value])]
    return frozenset(token for token in found if isinstance(token, int) and not isinstance(token, bool) and token >= 0)


def _eos_of_tokenizer(directory: Path) -> int | None:
    """Return the id of `eos_token`, as transformers finds it.

    It is in special_tokens_map.json or tokenizer_config.json; the latter takes precedence if it lists the added tokens.
    """
    config = _optional(directory / "tokenizer_config.json")
    usual = {} if (directory / "tokenizer.json").is_file() else {"eos_token": _DEFAULT_EOS}
    listed = {} if "added_tokens_decoder" in config else _optional(directory / "special_tokens_map.json")
    text = _content((usual | config | listed).get("eos_token"))
    if text is None:
        return None
    added = config.get("added_tokens_decoder")
    for token_id, token in added.items() if isinstance(added, dict) else ():
        if _content(token) == text and token_id.isdecimal():
            return int(token_id)
    tokenizer = load_tokenizer(directory)
    return None if tokenizer is None else tokenizer.token_id(text)


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _read(directory: Path | None, source: str | Path) -> dict[str, Any]:
    if source not in (AUTO, VLLM):
        remedy = f"name a directory that has it as generation_config, or {AUTO!r} or {VLLM!r}"
        return read_json_object(Path(source) / FILE, ConfigError, remedy)
    return {} if directory is None else _optional(directory / FILE)


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path, ConfigError, _AGAIN) if path.is_file() else {}
