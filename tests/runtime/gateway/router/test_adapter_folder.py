"""--lora-modules-from: engines have the adapters of a directory's folders, as these come, change and go."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sidestream.runtime.api.errors import EngineDeadError, OverloadedError, RequestError, ServerError
from sidestream.runtime.gateway.interfaces import AdapterCard, GatewayHealth
from sidestream.runtime.gateway.router import adapter_folder
from sidestream.runtime.gateway.router.adapter_folder import AdapterFolder
from sidestream.runtime.gateway.router.adapter_root import CONFIG, WEIGHTS, AdapterRoot
from sidestream.runtime.gateway.router.router import Router
from support.gateway import FakeEngines, gateway
from support.serving import serve_fake


class Engines(FakeEngines):
    """Keeps what it is told; `refusal` says with what an adapter is refused."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.cards = [AdapterCard(name, 8, "") for name in names]
        self.refusal: Callable[[str], Exception | None] = lambda name: None

    def names(self) -> set[str]:
        return {card.name for card in self.cards}

    async def load_adapter(self, name: str, path: str, replace: bool) -> None:
        await super().load_adapter(name, path, replace)
        if (problem := self.refusal(name)) is not None:
            raise problem
        self.cards = [card for card in self.cards if card.name != name] + [AdapterCard(name, 8, "")]

    async def unload_adapter(self, name: str) -> None:
        await super().unload_adapter(name)
        self.cards = [card for card in self.cards if card.name != name]


def write(root: Path, name: str, weights: bytes = b"weights", config: str | None = None) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"r": 8}) if config is None else config)
    (folder / WEIGHTS).write_bytes(weights)
    return folder


def updates(folder: AdapterFolder, count: int) -> None:
    async def run() -> None:
        for _ in range(count):
            await folder.update()

    asyncio.run(run())


def versions(root: Path) -> dict[str, str]:
    return {name: offer.version for name, offer in AdapterRoot(str(root)).scan().items()}


def test_added_changed_and_removed_folders(tmp_path: Path) -> None:
    write(tmp_path, "first")
    engines = Engines("first")
    folder = AdapterFolder(str(tmp_path), versions(tmp_path), engines)
    updates(folder, 3)
    assert engines.calls == []
    path = str(write(tmp_path, "second"))
    updates(folder, 5)
    assert engines.calls == [("load", "second", path, True)]
    write(tmp_path, "second", b"other weights")
    updates(folder, 5)
    assert engines.calls[1:] == [("load", "second", path, True)]
    shutil.rmtree(tmp_path / "first")
    updates(folder, 5)
    assert engines.calls[2:] == [("unload", "first")] and engines.names() == {"second"}
    (tmp_path / "second" / WEIGHTS).unlink()
    updates(folder, 5)
    assert engines.calls[3:] == [("unload", "second")], "a folder without weights is no adapter"


def test_a_folder_is_not_loaded_while_it_is_written(tmp_path: Path) -> None:
    engines = Engines()
    folder = AdapterFolder(str(tmp_path), {}, engines)
    for size in range(1, 6):
        write(tmp_path, "growing", b"x" * size)
        updates(folder, 1)
    assert engines.calls == []
    updates(folder, 1)
    assert engines.calls == [("load", "growing", str(tmp_path / "growing"), True)]


def test_an_adapter_that_vanishes_for_one_scan_is_not_unloaded(tmp_path: Path) -> None:
    path = write(tmp_path, "one")
    engines = Engines("one")
    folder = AdapterFolder(str(tmp_path), versions(tmp_path), engines)
    path.rename(tmp_path / ".hidden")
    updates(folder, 1)
    (tmp_path / ".hidden").rename(path)
    updates(folder, 3)
    assert ("unload", "one") not in engines.calls and engines.names() == {"one"}


def test_what_the_engines_left_out_at_their_start_is_loaded_later(tmp_path: Path) -> None:
    for name in ("one", "damaged"):
        write(tmp_path, name)
    engines = Engines("one")
    engines.status = GatewayHealth("loading")
    folder = AdapterFolder(str(tmp_path), versions(tmp_path), engines)
    updates(folder, 3)
    assert engines.calls == [], "no engine is ready"
    engines.status = GatewayHealth("ok")
    updates(folder, 3)
    assert engines.calls == [("load", "damaged", str(tmp_path / "damaged"), True)]


@pytest.mark.parametrize(
    ("problem", "tries"),
    [
        (ServerError("its rank is 512", "adapter_error"), 1),
        (RequestError("no"), 1),
        (ServerError("it is being loaded", "adapter_in_use"), 4),
        (EngineDeadError("gone", "engine_dead"), 4),
        (OverloadedError("loading", "loading"), 4),
        (TimeoutError(), 4),
    ],
)
def test_a_refused_adapter_is_tried_again_if_that_may_help(
    tmp_path: Path, problem: Exception, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    engines = Engines()
    engines.refusal = lambda name: problem
    folder = AdapterFolder(str(tmp_path), {}, engines)
    write(tmp_path, "one")
    updates(folder, 5)
    assert len(engines.calls) == tries
    assert ("'one'" in caplog.text and str(problem) in caplog.text) == (tries == 1)
    engines.refusal = lambda name: None
    write(tmp_path, "one", b"repaired")
    updates(folder, 3)
    assert engines.names() == {"one"}


def test_the_gateway_follows_the_directory_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_folder, "SCAN_SECONDS", 0.01)

    async def scene() -> None:
        engines = Engines()
        async with gateway(engines, adapters_folder=str(tmp_path / "adapters")) as http, asyncio.timeout(120):
            write(tmp_path / "adapters", "sql")  # the directory did not exist when it started
            while "sql" not in (await http.get("/v1/models")).text:
                await asyncio.sleep(0.01)
            shutil.rmtree(tmp_path / "adapters" / "sql")
            while "sql" in (await http.get("/v1/models")).text:
                await asyncio.sleep(0.01)

    asyncio.run(scene())


def test_a_change_is_an_entry_of_the_engines_map(tmp_path: Path) -> None:
    root, place = tmp_path / "adapters", tmp_path / "e"
    root.mkdir()
    place.mkdir()

    async def run(address: str) -> None:
        router = Router([address], poll_seconds=0.05, request_engine=lambda: None)
        await router.start()
        try:
            await router.model()
            folder = AdapterFolder(str(root), {}, router)
            async with asyncio.timeout(60):
                write(root, "new")
                while await router.adapter("new") is None:
                    await folder.update()
                (link,) = router._links.values()
                assert link.held.entries["new"].path == str(root / "new"), "the engine has recorded the change"
                await router.unload_adapter("new")  # as a client does: the folder is not loaded again
                for _ in range(3):
                    await folder.update()
                assert await router.adapter("new") is None and link.held.entries["new"].path is None
                write(root, "new", b"a later version")
                while await router.adapter("new") is None:
                    await folder.update()
        finally:
            await router.close()

    with serve_fake(place, adapters=1, num_slots=4, adapter_roots=[str(root)]) as server:
        asyncio.run(run(server.address))
