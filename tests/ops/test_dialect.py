"""Every op is written in one way: `reference`, `fake` and `launch` in the file that registers it (CONTRIBUTING.md)."""

import inspect
import sys
from collections import Counter

import pytest
import sidestream.ops.all_ops  # noqa: F401  registers the ops
from sidestream.ops.core.registry import OPS, Op

PARTS = ("reference", "fake", "launch")
OF_THE_PACKAGE = {name: op for name, op in OPS.items() if op.reference.__module__.startswith("sidestream.ops.")}
IN_A_FILE = Counter(op.reference.__module__ for op in OF_THE_PACKAGE.values())


def parameters(part: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(part).parameters)  # type: ignore[arg-type]


def test_every_op_of_the_package_is_looked_at() -> None:
    assert len(OF_THE_PACKAGE) > 30 and len(IN_A_FILE) > 20 and max(IN_A_FILE.values()) > 1


@pytest.mark.parametrize("op", OF_THE_PACKAGE.values(), ids=OF_THE_PACKAGE.keys())
def test_its_functions_have_the_names_of_the_dialect(op: Op) -> None:
    module = op.reference.__module__
    prefix = "" if IN_A_FILE[module] == 1 else f"{op.name}_"
    for part in PARTS:
        function = getattr(op, part)
        assert (function.__module__, function.__name__) == (module, prefix + part)
    assert getattr(sys.modules[module], op.name) is op, "the module holds the op under its name"


@pytest.mark.parametrize("op", OF_THE_PACKAGE.values(), ids=OF_THE_PACKAGE.keys())
def test_its_functions_take_the_same_arguments(op: Op) -> None:
    arguments = list(parameters(op.reference))
    fake = parameters(op.fake)
    named = [name for name, found in fake.items() if found.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert named == arguments or (named == arguments[: len(named)] and list(fake) == [*named, "_"])
    launch = parameters(op.launch)
    assert list(launch)[: len(arguments)] == arguments
    keywords = [name for name, found in launch.items() if found.kind is inspect.Parameter.KEYWORD_ONLY]
    assert keywords[:3] == ["out", "sm_budget", "pdl"] and set(launch) == {*arguments, *keywords}
    assert launch["out"].default is inspect.Parameter.empty or op.mutates  # which may have no results
    assert launch["sm_budget"].default is None and launch["pdl"].default is False
    assert all(launch[name].default is not inspect.Parameter.empty for name in keywords[1:])


@pytest.mark.parametrize("op", OF_THE_PACKAGE.values(), ids=OF_THE_PACKAGE.keys())
def test_its_functions_say_what_they_do(op: Op) -> None:
    assert all(inspect.getdoc(getattr(op, part)) for part in PARTS)
