"""Options of a model and its engine in the spelling of vLLM, and their conversion to arguments of `LLM`."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from ...compiler.options import DEFAULT_PRECISION, TENSOR_PARALLEL, Layers, Precision, choices
from ...graphs.families import ADAPTER_PARTS
from ...graphs.model_directory import adapter_directory
from ...graphs.model_directory import model_directory as hub_or_path
from ...runtime.api.checks import MAX_DRAFTS, is_speculation
from ...runtime.demo_model import DEMO_MODEL, demo_adapters
from ...runtime.engine.options import TARGET_NAMES, keywords
from ...runtime.engine.vllm_keywords import without_vllm_keywords
from ...runtime.processes.logs import progress_line

ADVANCED = "advanced"
UNITS = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
"""Suffixes of numbers, as in vLLM."""


def add_command(
    commands: "argparse._SubParsersAction[Any]",
    name: str,
    about: str,
    description: str | None,
    examples: str | None = None,
    run: Callable[[argparse.Namespace], int] | None = None,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    about        its line in the list of commands
    description  text before the options; `examples`: text after them
    run          runs the command and returns the exit code; None for a group of commands
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        name, help=about, usage=usage, description=description, epilog=examples, formatter_class=form
    )
    parser.set_defaults(run=run)
    return parser


def at_least(low: int) -> Callable[[str], int]:
    """Return a parser of integers from `low` on; k and m multiply by powers of 1000, K and M by powers of 1024."""

    def integer(text: str) -> int:
        try:
            value = int(float(text[:-1]) * UNITS[text[-1]]) if text[-1:] in UNITS else int(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer; write it such as 8192, 8k or 8K") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} must be at least {low}")
        return value

    integer.__name__ = "int"
    return integer


positive = at_least(1)


def add_value(
    group: Any,
    flag: str,
    default: Any,
    about: str,
    kind: Callable[[str], Any] = positive,
    metavar: Any = "N",
    **more: Any,
) -> None:
    """Add a flag with a value of type `kind`; its help is `about` with the default."""
    values = default if isinstance(default, (list, tuple)) else [default]
    shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    group.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{about} (default: {shown})", **more)


def number(name: str, low: float, high: float, unit: str = "", above: bool = False) -> Callable[[str], float]:
    """Return a parser of numbers from `low` to `high`, without `low` if `above`. `name`: for text that is no number."""
    limits = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text} must be {limits}{unit}")
        return value

    parse.__name__ = name
    return parse


share = number("share", 0, 1, above=True)
seconds = number("seconds", 0, 86400, " seconds")


def layers(text: str) -> bool | tuple[int, ...]:
    """Parse `on`, `off`, or numbers of layers such as 0,3-7."""
    if text in ("on", "off"):
        return text == "on"
    chosen: set[int] = set()
    for part in text.split(","):
        if not re.fullmatch(r"\d{1,4}(-\d{1,4})?", part):
            raise argparse.ArgumentTypeError(f"{text!r} is not on, off, or numbers of layers such as 0,3-7")
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise argparse.ArgumentTypeError(f"{text!r}: {part} runs backwards; write {last}-{first}")
        chosen |= set(range(int(first), int(last or first) + 1))
    return tuple(sorted(chosen))


def short(dtype: str) -> str:
    """Return our name of a dtype in vLLM's or ours."""
    return {"bfloat16": "bf16"}.get(dtype, dtype)


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not JSON ({problem})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a JSON object")
    return found


def speculation(text: str) -> str | int:
    """Parse `off`, `auto` or a number of drafts."""
    value = int(text) if text.isdecimal() else text
    if not is_speculation(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not off, auto, or a number of drafts from 1 to {MAX_DRAFTS}")
    return value


def named_paths(text: str) -> list[tuple[str, str]]:
    """Parse `name=path` of --lora-modules, or vLLM's JSON: an object or a list. A path may be a cached hub id."""
    if not text.startswith(("{", "[")):
        return [_named_path(*text.partition("="))]
    try:
        content = json.loads(text)
        adapters = [(str(each["name"]), str(each["path"])) for each in ([content] if text[0] == "{" else content)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not JSON of adapters: {{"name": "pirate", "path": "adapters/pirate"}}, or a list of these'
        ) from None
    return [_named_path(name, "=", path) for name, path in adapters]


def _named_path(name: str, equals: str, path: str) -> tuple[str, str]:
    if not equals or not path or not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name):
        raise argparse.ArgumentTypeError(
            f"{name + equals + path!r} is not NAME=DIRECTORY (a name has letters, digits, '.', '_' and '-'), such as "
            "pirate=adapters/pirate"
        )
    return name, path


def add_model(
    parser: argparse.ArgumentParser,
    about: str = "a Hugging Face directory (default: the demo model with its adapters)",
) -> None:
    """Add the optional MODEL."""
    parser.add_argument("--model", help=argparse.SUPPRESS)  # the spelling of other servers
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=about)


def add_option(group: Any, name: str, flag: str = "", **changes: Any) -> None:
    """Add the flag of an option of `LLM`, with type, choices, default and help of the option's field but for `changes`.

    A flag that is not given is None (a switch: False), so that the option's own default applies.
    """
    option = keywords()[name]
    low, high = option.metadata.get("range", (None, None))
    kind = next((kind for kind in (bool, int, float) if kind in (option.type, *get_args(option.type))), None)
    doc, default = option.metadata["doc"], option.metadata["unset"] or option.default
    arguments: dict[str, Any] = {"help": f"{doc} (default: {default})" if default is not None else doc}
    if choices(option):
        arguments["choices"] = choices(option)
    elif option.type == Layers:
        arguments |= {"type": layers, "metavar": "LAYERS"}
        arguments["help"] = f"{doc}: on, off, or layers such as 0,3-7 (default: {default})"
    elif kind is bool:
        arguments = {"action": "store_true", "help": doc if not option.default else f"do not {doc}"}
    elif kind is int:
        arguments |= {"type": at_least(low), "metavar": "N"}
    elif kind is float and low is not None:
        arguments |= {"type": number("number", low, high), "metavar": "N"}
    elif kind is float:
        arguments |= {"type": share, "metavar": "SHARE"}
    group.add_argument(flag or f"--{name.replace('_', '-')}", **arguments | changes)


def advanced(parser: argparse.ArgumentParser) -> Any:
    """Return the group of rarely used options, which is last in the help."""
    known = (group for group in parser._action_groups if group.title == ADVANCED)
    return next(known, None) or parser.add_argument_group(ADVANCED)


def add_compile_options(parser: argparse.ArgumentParser, precision: Precision | None = DEFAULT_PRECISION) -> None:
    """Add the options of the compiler; `precision`: default, None leaves it to `LLM`."""
    changes: dict[str, Any] = {}
    if precision is not None:
        doc = keywords()["precision"].metadata["doc"]
        changes = {"default": precision, "help": f"{doc} (default: {precision}, on a CPU too)"}
    group = parser.add_argument_group("compiler")
    add_option(group, "precision", **changes)
    add_option(group, "exact")
    group = advanced(parser)
    add_option(group, "kv_cache_dtype", type=short, choices=("auto", "fp8", "fp8_e4m3", "int8", "bf16"), default="auto")
    group.add_argument("--no-hadamard", action="store_true", help="the same as --hadamard off")
    for name in ("hadamard", "center_keys", "balance_keys", "rotate_values"):
        add_option(group, name)
    add_option(group, "lora_dtype", type=short)
    doc = keywords()["disable_passes"].metadata["doc"]
    group.add_argument("--disable-pass", action="append", default=[], metavar="PASS", help=f"{doc}; may be repeated")


class _Adapters(argparse.Action):
    """Appends the adapters of all words."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        former = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*former, *(adapter for word in values for adapter in word)])


def add_lora_options(parser: argparse.ArgumentParser) -> None:
    """Add adapters and their limits."""
    group = parser.add_argument_group("adapters")
    group.add_argument(
        "--lora-modules",
        nargs="+",
        action=_Adapters,
        default=[],
        type=named_paths,
        metavar="NAME=DIR",
        help="PEFT adapters to load; DIR may also be a hub id in the local cache",
    )
    add_option(group, "max_loras", type=positive)
    add_option(group, "max_lora_rank", metavar="R")
    add_option(group, "max_expert_rank", metavar="R")
    add_option(group, "lora_lenient")
    add_option(group, "lora_target_modules", nargs="+", action="extend", choices=TARGET_NAMES, metavar="NAME")
    add_option(group, "lora_parts", nargs="+", action="extend", choices=ADAPTER_PARTS, metavar="PART")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of `LLM`."""
    add_compile_options(parser, precision=None)
    add_lora_options(parser)
    group = parser.add_argument_group("engine")
    add_option(group, "max_model_len")
    add_option(advanced(parser), "calibration", metavar="FILE|off")
    add_option(advanced(parser), "rounded_weights", metavar="FILE")
    add_option(
        advanced(parser),
        "cascade_attention",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=f"{keywords()['cascade_attention'].metadata['doc']} (default: on)",
    )
    add_option(group, "max_num_seqs")
    add_option(group, "max_num_batched_tokens")
    add_option(group, "speculation", type=speculation, metavar="off|auto|N")
    add_option(group, "speculation_history", metavar="TOKENS")
    add_option(group, "draft", metavar="DIR")
    add_ranks(group)
    add_run_options(group)


def add_ranks(group: Any) -> None:
    """Add the number of GPUs of a model."""
    add_option(group, "tensor_parallel_size", type=int, choices=TENSOR_PARALLEL, metavar="N")


def ranks_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `add_ranks` for `CompileOptions`, for the programs of tp_rank 0."""
    world = options.tensor_parallel_size or 1
    return {"tensor_parallel": world, "gather_logits": world == 1}


def add_run_options(group: Any, seed: str = "seed of the sampling") -> None:
    """Add memory, CUDA graphs, device and seed; `seed`: help of the latter."""
    add_option(group, "gpu_memory_utilization")
    add_option(group, "enforce_eager")
    add_option(group, "device", choices=("cpu", "cuda"))
    group.add_argument("--seed", type=int, default=0, help=f"{seed} (default: 0)")


def model_directory(options: argparse.Namespace) -> Path:
    """Return the directory of MODEL, or of the demo model.

    Raises ValueError if it is not a model directory.
    """
    directory = hub_or_path(options.model) if options.model else DEMO_MODEL
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} is not a model directory: it has no config.json; name one in the Hugging Face format, or "
            "leave MODEL out for the demo model"
        )
    return directory


def adapters_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the adapters by name: those of --lora-modules, or the demo model's without MODEL."""
    chosen = dict(options.lora_modules)
    if len(chosen) < len(options.lora_modules):
        names = [name for name, _ in options.lora_modules]
        twice = max(names, key=names.count)
        raise ValueError(f"--lora-modules names adapter {twice!r} twice; give each its own name")
    if not options.model:
        chosen = {name: str(path) for name, path in demo_adapters().items()} | chosen
    found = {}
    for name, path in chosen.items():
        try:
            found[name] = str(adapter_directory(path))
        except ValueError as problem:
            raise ValueError(f"adapter {name!r}: {problem}") from None
    return found


def precision_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return arguments of `LLM`, which chooses Hadamard and centring unless they are given."""
    kv_dtype = "fp8_e4m3" if options.kv_cache_dtype == "fp8" else options.kv_cache_dtype
    arguments = {"kv_cache_dtype": kv_dtype, "disable_passes": tuple(options.disable_pass)}
    if options.no_hadamard:
        arguments["hadamard"] = False
    names = "precision", "exact", "hadamard", "center_keys", "balance_keys", "rotate_values", "lora_dtype"
    return arguments | given(options, *names)


def compile_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the same as arguments of `CompileOptions`."""
    arguments = precision_arguments(options)
    kv_dtype, disable = arguments.pop("kv_cache_dtype"), arguments.pop("disable_passes")
    return {"kv_dtype": kv_dtype, "disable": disable, **arguments}


def llm_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return arguments of `LLM`; options that are not given keep its defaults."""
    arguments = precision_arguments(options)
    arguments |= {
        "model": str(model_directory(options)),
        "adapters": adapters_of(options),
        "enforce_eager": options.enforce_eager,
        "seed": options.seed,
        "lora_lenient": options.lora_lenient,
    }
    arguments |= given(
        options,
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "speculation",
        "speculation_history",
        "draft",
        "max_loras",
        "max_lora_rank",
        "max_expert_rank",
        "lora_target_modules",
        "lora_parts",
        "gpu_memory_utilization",
        "device",
        "calibration",
        "rounded_weights",
        "cascade_attention",
        "tensor_parallel_size",
    )
    if getattr(options, "enable_lora", False):
        arguments["enable_lora"] = True
    return without_vllm_keywords(arguments, bool(arguments["adapters"]))


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options of `names` that have a value."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def check_output(flag: str, path: Path | None) -> None:
    """Raise ValueError if a file cannot be written, before any work; None is no file."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{flag} {path}: name a file in an existing directory")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written; name a file in a directory of your own")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add `path` to errors of a full disk, which name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_output_directory(flag: str, path: Path) -> None:
    """Raise ValueError if a directory cannot be made or written, before any work."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{flag} {path} is a file; name a directory")
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {path} cannot be written; name a directory of your own")


def report(line: str) -> None:
    """Print a line on the progress of the command on stderr."""
    print(progress_line(line), file=sys.stderr, flush=True)


def demo_prompts() -> list[dict[str, str | None]]:
    """Return the demo's batch: {"adapter", "prompt", "answer"} each; the adapter is None for the base model."""
    return json.loads((DEMO_MODEL / "prompts.json").read_text())
