"""One headless chromium for all page tests. Messages on its console fail a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import CHROMIUM, DRIVER, Browser, browser
from support.dumped import dumped_8b


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver")
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def silent_console(window: Browser) -> Iterator[None]:
    window.errors()
    yield
    assert window.errors() == []


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump's page of the 8B shape with eight of its layers, a decode program and a mixed one."""
    return dumped_8b(tmp_path_factory.mktemp("dump"), layers=8)


@pytest.fixture
def opened(window: Browser, page: Path) -> Browser:
    """The dump's page, freshly loaded on a laptop's screen."""
    window.size(1360, 900)
    window.prefer("light")
    window.open(page)
    window.run("try { localStorage.clear() } catch {} location.hash = ''")
    window.open(page)
    return window
