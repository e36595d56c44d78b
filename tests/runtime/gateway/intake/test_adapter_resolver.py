"""--resolve-adapters: a model name that is a folder below a root is loaded at its first request, once."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from sidestream.runtime.api.errors import ServerError
from sidestream.runtime.gateway.interfaces import AdapterCard, Caller
from sidestream.runtime.gateway.router.adapter_root import CONFIG
from support.gateway import Books, FakeEngines, gateway


class Engines(FakeEngines):
    """Loads adapters. `gate_of_loads`: no load ends before it is set. `refusal` may refuse one."""

    def __init__(self) -> None:
        super().__init__()
        self.cards = []
        self.gate_of_loads = asyncio.Event()
        self.gate_of_loads.set()
        self.refusal: Callable[[str], Exception | None] = lambda name: None

    async def load_adapter(self, name: str, path: str, replace: bool) -> None:
        await super().load_adapter(name, path, replace)
        await self.gate_of_loads.wait()
        if (problem := self.refusal(name)) is not None:
            raise problem
        self.cards = [*self.cards, AdapterCard(name, 8, "")]


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / CONFIG).write_text('{"r": 8}')


def body(model: str) -> dict[str, object]:
    return {"model": model, "prompt": [1, 2, 3], "max_tokens": 4}


async def statuses(http, *models: str) -> list[int]:
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body(model)) for model in models))
    return [answer.status_code for answer in answers]


def run(root: Path | str, scene, engines: Engines | None = None, **settings) -> Engines:
    async def main() -> None:
        async with gateway(made, resolve_roots=[str(root)], **settings) as http, asyncio.timeout(120):
            await scene(made, http)

    made = engines or Engines()
    asyncio.run(main())
    return made


def test_first_requests_at_once_load_an_adapter_once(tmp_path: Path) -> None:
    put(tmp_path, "sql")

    async def scene(engines: Engines, http) -> None:
        assert await statuses(http, *["sql"] * 8, "base:sql") == [200] * 9
        assert {request.adapter for request in engines.asked} == {"sql"}
        assert await statuses(http, "sql") == [200]
        assert "sql" in (await http.get("/v1/models")).text

    assert run(tmp_path, scene).calls == [("load", "sql", str(tmp_path / "sql"), False)]


def test_other_endpoints_load_it_too_but_reading_the_list_does_not(tmp_path: Path) -> None:
    names = ["chat", "messages", "tokenize", "listed"]
    put(tmp_path, *names)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

    async def scene(engines: Engines, http) -> None:
        assert (await http.get("/v1/models/listed")).status_code == 404
        assert (await http.post("/v1/chat/completions", json=chat | {"model": "chat"})).status_code == 200
        assert (await http.post("/v1/messages", json=chat | {"model": "messages"})).status_code == 200
        assert (await http.post("/tokenize", json={"model": "tokenize", "prompt": "x"})).status_code == 200

    assert [call[1] for call in run(tmp_path, scene).calls] == names[:3]


def test_names_that_are_no_folder_of_the_root_stay_unknown(tmp_path: Path) -> None:
    root = tmp_path / "root"
    put(root, "sql", ".hidden", "deep/inside", "-option")
    put(tmp_path, "outside")
    (root / "linked-out").symlink_to(tmp_path / "outside")
    (root / "linked-in").symlink_to(root / "sql")
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    (root / "dangling").symlink_to(root / "nothing")
    hostile = ["..", ".", "../outside", "../root/sql", str(root / "sql"), "deep/inside", "sql/", "/sql", "x" * 200]
    hostile += [
        ".hidden",
        "-option",
        "linked-out",
        "empty",
        "file",
        "dangling",
        "missing",
        "sql\n",
        "sql\0",
        "memory://x",
    ]

    async def scene(engines: Engines, http) -> None:
        for name in hostile:
            assert await statuses(http, name) == [404], name
        assert engines.calls == []
        assert await statuses(http, "linked-in") == [200]

    run(root, scene)


def test_a_key_loads_only_what_it_may_use(tmp_path: Path) -> None:
    put(tmp_path, "sql", "secret")
    books = Books()
    books.hidden.add("secret")

    async def scene(engines: Engines, http) -> None:
        assert await statuses(http, "secret", "sql") == [404, 200]

    engines = run(tmp_path, scene, admission=books)
    assert [call[1] for call in engines.calls] == ["sql"]


def test_without_the_setting_nothing_is_loaded(tmp_path: Path) -> None:
    async def scene() -> None:
        engines = Engines()
        async with gateway(engines) as http:
            assert await statuses(http, "sql") == [404]
        assert engines.calls == []

    asyncio.run(scene())


def test_an_owner_loads_one_adapter_at_a_time_and_delays_no_other(tmp_path: Path) -> None:
    put(tmp_path, *(f"a{number}" for number in range(8)), "b")

    async def scene(engines: Engines, http) -> None:
        engines.gate_of_loads.clear()
        flood = asyncio.create_task(statuses(http, *(f"a{number}" for number in range(8))))
        while not engines.calls:
            await asyncio.sleep(0.01)
        other = asyncio.create_task(http.post("/v1/completions", json=body("b"), headers={"Authorization": "Bearer b"}))
        while len(engines.calls) < 2:
            await asyncio.sleep(0.01)
        assert [call[1] for call in engines.calls] == ["a0", "b"]
        engines.gate_of_loads.set()
        assert await flood == [200] * 8 and (await other).status_code == 200

    class Owners(Books):
        def identify(self, authorization, client_host):
            return Caller("b" if authorization else "a", key_id="key")

    run(tmp_path, scene, admission=Owners())


def test_a_refusal_is_the_answer_and_another_gateways_load_is_waited_for(tmp_path: Path) -> None:
    put(tmp_path, "large", "shared")
    engines = Engines()

    def refuse(name: str) -> Exception | None:
        if name == "large":
            return ServerError("adapter 'large': its rank is 512; start with --max-lora-rank 512", "adapter_error")
        engines.cards = [AdapterCard("shared", 8, "")]  # the other gateway's load ends meanwhile
        return ServerError("adapter 'shared' is being loaded or unloaded at this moment", "adapter_in_use")

    engines.refusal = refuse

    async def scene(engines: Engines, http) -> None:
        answer = await http.post("/v1/completions", json=body("large"))
        assert answer.status_code == 400 and "--max-lora-rank 512" in answer.text
        assert await statuses(http, "shared") == [200]

    run(tmp_path, scene, engines)


def test_a_root_may_be_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file(f"/bucket/adapters/sql/{CONFIG}", b"{}")

    async def scene(engines: Engines, http) -> None:
        assert await statuses(http, "missing", "sql") == [404, 200]

        def broken(self, path):
            raise RuntimeError("no credentials")

        monkeypatch.setattr(type(store), "isfile", broken)
        answer = await http.post("/v1/completions", json=body("other"))
        assert answer.status_code == 503 and "--adapter-root cannot be read" in answer.text
        assert "no credentials" not in answer.text and "no credentials" in caplog.text

    try:
        engines = run("memory://bucket/adapters", scene)
    finally:
        store.store.clear()
    assert engines.calls == [("load", "sql", "memory://bucket/adapters/sql", False)]


def test_a_client_that_disconnects_ends_its_wait_not_the_load(tmp_path: Path) -> None:
    put(tmp_path, "sql", "next")

    async def scene(engines: Engines, http) -> None:
        engines.gate_of_loads.clear()
        first = asyncio.create_task(http.post("/v1/completions", json=body("sql")))
        while not engines.calls:
            await asyncio.sleep(0.01)
        first.cancel()
        second = asyncio.create_task(statuses(http, "next", "sql"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(engines.calls) == 1, "the load has its owner's turn until it ends"
        engines.gate_of_loads.set()
        assert await second == [200, 200]

    assert [call[1] for call in run(tmp_path, scene).calls] == ["sql", "next"]
