"""Spelling of options in error messages: Python keywords (`max_lora_rank=64`) become flags (`--max-lora-rank 64`) for
the command line and for servers.
"""

import re
from collections.abc import Collection
from functools import cache

from .options import keywords

_ALIASES = {"kv_dtype": "kv_cache_dtype", "disable_passes": "disable_pass"}
PYTHON_ONLY = (
    "rotate_activations",
    "norm_rotation",
    "smooth_channels",
    "lm_head",
    "finer_logits",
    "finer_residual",
    "lora_sm_share",
    "whole_layer",
    "dtype",
    "passes",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "show_progress",
)
"""Keywords of `LLM` without a flag; of `enable_prefix_caching` only one value has a flag."""
_ADAPTER = re.compile(r"adapters=\{'([^'{}]*)': '([^'{}]*)'\}")
_ADAPTERS = re.compile(r"(?:give it to )?LLM\(adapters=[^()]*\)(?: or (?:call )?add_adapter(?: first)?)?")


def with_flags(text: str, options: Collection[str]) -> str:
    """Return a message with a command's flags in place of Python keywords.

    `options`: Python names of the command's options. `name=value` becomes `--name value`. A name without a value is
    replaced only if it has an underscore, because other names may be ordinary words.
    """
    text = _ADAPTER.sub(r"--lora-modules \1=\2", text)
    text = _ADAPTERS.sub("name it with --lora-modules NAME=DIR", text)
    text = text.replace("adapters={name: path}", "--lora-modules NAME=DIR")
    text = text.replace("enable_prefix_caching=False", "--no-prefix-caching")
    return _named(frozenset(options)).sub(_flag, text)


def with_keywords(text: str) -> str:
    """Return a message with Python keywords in place of those flags that have one; see `with_flags`."""

    def keyword(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        name = next((ours for ours, flag in _ALIASES.items() if flag == name), name)
        return name if name in keywords() else found[0]

    return re.sub(r"--([a-z][a-z-]*[a-z])", keyword, text).replace("--no-prefix-caching", "enable_prefix_caching=False")


def with_server_flags(text: str) -> str:
    """Return a server's message with flags of `sidestream serve` in place of Python keywords, except for names that
    are also fields of requests.
    """
    return with_flags(text, server_options())


@cache
def server_options() -> frozenset[str]:
    """Return the options of `LLM` that are flags of `sidestream serve` but not fields of requests."""
    names = [name for name in keywords() if "_" in name or name == "exact"]
    return frozenset(name for name in names if name not in (*PYTHON_ONLY, *_ALIASES))


@cache
def _named(options: frozenset[str]) -> re.Pattern[str]:
    names = {*options, *(name for name, option in _ALIASES.items() if option in options)}
    either = "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or r"(?!)"
    return re.compile(rf"(?<![\w.'\"/-])(?P<name>{either})(?P<value>=True\b|=(?=\S)|(?![\w=('\"/-]))")


def _flag(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if "_" not in name and not value:
        return name
    flag = f"--{_ALIASES.get(name, name).replace('_', '-')}"
    return f"{flag} " if value == "=" else flag
