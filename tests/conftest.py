"""Sets up every test run:

`interpret` tests need TRITON_INTERPRET=1 (a process of their own), `gpu` tests a CUDA device.
"""

import os

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("interpret") and not INTERPRETING:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Programs that tests keep for a second start lie in a directory of this run."""
    os.environ["SIDESTREAM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def fresh_seed(request: pytest.FixtureRequest) -> None:
    """Each test draws its own random inputs, the same ones at every run."""
    torch.manual_seed(
        abs(hash(request.node.name)) % 2**31 if os.environ.get("PYTHONHASHSEED") else sum(map(ord, request.node.nodeid))
    )
