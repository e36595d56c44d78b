"""Flags of the launchers of vLLM, SGLang and LoRAX that Sidestream does not have, and its own names for others.

`launcher_flags.toml` lists them; those that are keywords of vLLM's `LLM` are in `vllm_keywords`.
"""

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..api.unsupported import ANY, Unsupported


class LauncherFlag(NamedTuple):
    """A flag of another launcher. `nargs` as in argparse: 0 for a switch, None for one value, "+" for several."""

    unsupported: Unsupported
    nargs: int | str | None
    is_keyword: bool = False


@cache
def read_flags() -> tuple[dict[str, str], dict[str, LauncherFlag]]:
    """Return the renamed flags with their names here, and the unsupported flags."""
    content = tomllib.loads(Path(__file__).with_name("launcher_flags.toml").read_text(encoding="utf-8"))
    flags: dict[str, LauncherFlag] = {}
    for group in content["group"]:
        for kind, nargs in (("switches", 0), ("values", None), ("lists", "+")):
            accepted: dict[str, list[Any]] = {}
            for word in group.get(kind, "").split():
                flag, equals, value = word.partition("=")
                accepted.setdefault(flag, []).extend([read_value(value)] if equals else [False] if nargs == 0 else [])
            for flag, values in accepted.items():
                values = [ANY] if group.get("accepted") == "any" else values
                add_flag(flags, flag, LauncherFlag(Unsupported(tuple(values), group["reason"]), nargs))
    return content["renamed"], flags


def add_flag(flags: dict[str, LauncherFlag], name: str, flag: LauncherFlag) -> None:
    """Add a flag, and for a switch its negation."""
    flags[name] = flag
    if flag.nargs == 0 and name.startswith("--"):
        flags[f"--no-{name[2:]}"] = flag


def read_value(text: str) -> Any:
    """Return a flag's value as a Python value."""
    try:
        return json.loads(text)
    except ValueError:
        return text
