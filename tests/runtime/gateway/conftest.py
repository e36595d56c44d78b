"""A server of the demo model with HTTP, shared by the tests of this folder."""

from collections.abc import Iterator

import pytest
from support.live_server import Served, serving


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving("--speculation", "3") as server:
        yield server
