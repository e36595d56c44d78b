"""Sets up every test run:

`interpret` tests need TRITON_INTERPRET=1 (a process of their own), `gpu` tests a CUDA device. A test marked
`machine_code` compiles its first configuration only, and with --exhaustive all of them. A test marked `first` starts
before all others: what takes minutes must not be what one process still does when the other has ended.
"""

import atexit
import gc
import os
from collections.abc import Iterator

import pytest
from support.installed import installed, wheel  # noqa: F401
from support.processor import processor_name

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
gc.set_threshold(20_000, 20, 100)  # a run keeps a million objects, and the default walks all of them too often
gc.disable()  # until all tests are collected; see pytest_collection_finish


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="compile every configuration to machine code, not one")


def pytest_report_header() -> str:
    return f"processor: {processor_name()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--exhaustive"):
        keep_one_configuration(config, items)
    import torch  # the process that only hands tests out does without it

    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    for item in items:
        if item.get_closest_marker("interpret") and not INTERPRETING:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What the imports and the collection have made stays to the end, and no later walk looks at it."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else Triton says of what it finds then that it leaked


def keep_one_configuration(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave of each `machine_code` test the first parameters; with `each="name"` those of each value of `name`."""
    seen: set[tuple[str, str]] = set()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        marker, given = item.get_closest_marker("machine_code"), getattr(item, "callspec", None)
        if marker is None or given is None:
            kept.append(item)
            continue
        kernel = item.nodeid.partition("[")[0], str(given.params.get(marker.kwargs.get("each", "")))
        (left if kernel in seen else kept).append(item)
        seen.add(kernel)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Programs that tests keep for a second start, and usage logs, lie in directories of this run. Its processes share
    the programs: what one has compiled the other starts with.
    """
    base = tmp_path_factory.getbasetemp()
    os.environ["SIDESTREAM_CACHE"] = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def shared_captures() -> Iterator[None]:
    """Llamas of one shape are captured once in a run."""
    from support.captured import captures_shared

    with captures_shared():
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Kernels in Triton's interpreter take half the time."""
    if not INTERPRETING:
        yield
        return
    from support.interpreter import without_waste

    with without_waste():
        yield


@pytest.fixture(autouse=True)
def fresh_seed(request: pytest.FixtureRequest) -> None:
    """Each test draws its own random inputs, the same ones at every run."""
    import torch

    torch.manual_seed(sum(map(ord, request.node.nodeid)))
