"""Ray reads its mode of authentication once, when it is imported: tests that import it use `secured`."""

import pytest
from sidestream.runtime.fleet.cluster import secure


@pytest.fixture
def secured(monkeypatch, tmp_path_factory):
    """Ray may be imported: it finds a token of its own."""
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path_factory.mktemp("ray") / "token"))
    secure()
