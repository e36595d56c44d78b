"""Source text of ops: an op's reference, its launch, and the Triton and Gluon functions that the launch reaches."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ....ops.core.registry import OPS
from ...program.calls import own_op

PACKAGE = __name__.partition(".compiler.")[0]
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Sources:
    """Sources of ops.

    functions  qualified name -> entry on the page
    ops        op -> names of its functions, by kind: `reference`, `launch`, `kernels`, `helpers`
    """

    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    ops: dict[str, dict[str, Any]] = field(default_factory=dict)


def kernel_sources(ops: Iterable[str], resources: Mapping[str, Mapping[str, Any]] | None = None) -> Sources:
    """Return the sources of `ops`, named as in a program; ops of other libraries have none.

    `resources`: kernel name -> its registers, shared memory and warps, if known.
    """
    sources = Sources()
    for name in sorted(set(ops)):
        op = own_op(name)
        if op is None:
            continue
        reached = list(_reached(op.launch))
        kernels = [_add(sources, each, "kernel", resources) for each, launched in reached if launched]
        helpers = [_add(sources, each, "device function", resources) for each, launched in reached if not launched]
        sources.ops[name] = {
            "reference": _add(sources, op.reference, "reference"),
            "launch": _add(sources, op.launch, "launch"),
            "kernels": list(dict.fromkeys(kernels)),
            "helpers": [helper for helper in dict.fromkeys(helpers) if helper not in kernels],
        }
    return sources


def _reached(launch: Any) -> Iterator[tuple[Any, bool]]:
    """Yield (device function, whether Python launches it) for each function reachable from a launch's code, once."""
    queue, seen = [(launch, True)], {id(launch)}
    while queue:
        function, on_host = queue.pop(0)
        for value in _named_by(function):
            if id(value) in seen:
                continue
            seen.add(id(value))
            device = _is_device(value)
            if device:
                yield value, on_host
            queue.append((value, on_host and not device))


def _named_by(function: Any) -> Iterator[Any]:
    plain = _plain(function)
    names = list(_names(plain.__code__))
    for name in names:
        value = plain.__globals__.get(name)
        if isinstance(value, ModuleType):
            own = vars(value) if _ours(value.__name__) else {}
            candidates = [own[other] for other in names if other in own]
        elif value is OPS:  # a launch that ends with another op's: OPS["quantize_rowwise"].launch
            constants = plain.__code__.co_consts
            candidates = [OPS[each].launch for each in constants if isinstance(each, str) and each in OPS]
        else:
            candidates = [value]
        for candidate in candidates:
            inner = _plain(candidate)
            if isinstance(inner, FunctionType) and _ours(inner.__module__):
                yield candidate


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _plain(value: Any) -> Any:
    """Return the Python function inside a jitted or cached one."""
    for _ in range(4):
        if isinstance(value, FunctionType):
            return getattr(value, "__wrapped__", value)
        value = getattr(value, "fn", None) or getattr(value, "__wrapped__", None)
    return value


def _is_device(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "triton"


def _ours(module: str) -> bool:
    return module.startswith(f"{PACKAGE}.ops")


def _name(function: Any) -> str:
    plain = _plain(function)
    return f"{plain.__module__.removeprefix(f'{PACKAGE}.')}.{plain.__qualname__}"


def _add(sources: Sources, function: Any, kind: str, resources: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    name = _name(function)
    if name not in sources.functions:
        plain = _plain(function)
        try:
            lines, first = inspect.getsourcelines(plain)
        except (OSError, TypeError):
            lines, first = ["# the source text is not installed\n"], 0
        file = Path(plain.__code__.co_filename).resolve()
        sources.functions[name] = {
            "kind": kind,
            "file": file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name,
            "line": first,
            "text": "".join(lines).rstrip(),
            "language": "Gluon"
            if "gluon" in type(function).__module__
            else "Triton"
            if _is_device(function)
            else "Python",
        }
        if resources and name in resources:
            sources.functions[name]["resources"] = dict(resources[name])
    return name
