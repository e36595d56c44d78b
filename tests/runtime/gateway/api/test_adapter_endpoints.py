"""Adapters as tools for vLLM and SGLang load, list and name them, over fake engines."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from sidestream.runtime.api.errors import ServerError
from sidestream.runtime.gateway.auth.admission import NoAuth
from support.gateway import FakeEngines, gateway

SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


class Loaded(FakeEngines):
    """Engines that list an adapter that a client has loaded, and refuse what lies elsewhere."""

    async def load_adapter(self, name: str, path: str, replace: bool) -> None:
        await super().load_adapter(name, path, replace)
        if not path.startswith("/adapters/"):
            raise ServerError("the path is outside the directories for adapters", "forbidden")
        self.cards = [*self.cards, _with_path(self.cards[0], name, path)]


def _with_path(card: Any, name: str, path: str) -> Any:
    return replace(card, name=name, path=path)


def test_vllm_s_texts_confirm_a_change() -> None:
    """Also with the fields that controllers of Kubernetes send."""

    async def scene() -> None:
        engines = Loaded()
        async with gateway(engines) as http:
            load = SQL | {"load_inplace": True, "base_model_name": "base"}
            loaded = await http.post("/v1/load_lora_adapter", json=load)
            unloaded = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql", "lora_int_id": 3})
        assert loaded.text == "Success: LoRA adapter 'sql' added successfully."
        assert unloaded.text == "Success: LoRA adapter 'sql' removed successfully."
        assert engines.calls == [("load", "sql", "/adapters/sql", True), ("unload", "sql")]

    run(scene)


def test_sglang_s_paths_answer_with_success_or_the_reason() -> None:
    async def scene() -> None:
        engines = Loaded()
        async with gateway(engines, NoAuth("user", "admin")) as http:

            async def post(path: str, body: Any, key: str = "admin") -> Any:
                return await http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

            loaded = await post("/load_lora_adapter", SQL | {"pinned": False})
            assert loaded.json() == {
                "success": True,
                "error_message": None,
                "loaded_adapters": {"pirate": "", "shout": "", "sql": "/adapters/sql"},
            }
            away = await post("/load_lora_adapter", {"lora_name": "b", "lora_path": "/etc"})
            assert away.status_code == 403 and away.json()["success"] is False
            assert "outside" in away.json()["error_message"]
            misspelt = await post("/load_lora_adapter", SQL | {"path": "x"})
            assert misspelt.status_code == 400 and "`path`" in misspelt.json()["error_message"]
            assert (await post("/unload_lora_adapter", {"lora_name": "sql"})).json()["success"] is True
            for path in ("/load_lora_adapter", "/unload_lora_adapter"):
                assert (await post(path, SQL, "user")).status_code == 403
        assert [call[0] for call in engines.calls] == ["load", "load", "unload"]

    run(scene)


def test_the_root_of_an_adapter_is_its_path_for_an_admin_only() -> None:
    async def scene() -> None:
        engines = Loaded()
        await engines.load_adapter("sql", "/adapters/sql", False)
        async with gateway(engines, NoAuth("user", "admin")) as http:
            for key, root in (("admin", "/adapters/sql"), ("user", "sql")):
                headers = {"Authorization": f"Bearer {key}"}
                listed = (await http.get("/v1/models", headers=headers)).json()["data"]
                one = (await http.get("/v1/models/sql", headers=headers)).json()
                assert one == listed[-1] and (one["id"], one["root"], one["parent"]) == ("sql", root, "base")
                assert [each["root"] for each in listed[:2]] == ["base", "pirate"]

    run(scene)


@pytest.mark.parametrize(
    ("named", "adapter"),
    [
        ({"model": "base:pirate"}, "pirate"),
        ({"model": "base", "lora_path": "pirate"}, "pirate"),
        ({"lora_path": "shout"}, "shout"),
        ({"model": "base:shout", "lora_path": "pirate"}, "shout"),
        ({"model": "shout", "lora_path": "pirate"}, "shout"),
        ({"model": "base", "lora_path": None}, None),
    ],
)
def test_an_adapter_is_named_as_in_sglang(named: dict[str, Any], adapter: str | None) -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines) as http:
            chat = await http.post("/v1/chat/completions", json=CHAT | named)
            text = await http.post("/v1/completions", json={"prompt": "x"} | named)
        assert chat.json()["model"] == text.json()["model"] == (adapter or "base")
        assert [request.adapter for request in engines.asked] == [adapter, adapter]

    run(scene)


def test_an_unknown_adapter_is_named_as_it_was_given() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            for named, shown in (
                ({"model": "base:no"}, "'base:no'"),
                ({"lora_path": "no"}, "'no'"),
                ({"model": "base:"}, "'base:'"),
            ):
                answer = await http.post("/v1/chat/completions", json=CHAT | named)
                assert answer.status_code == 404 and shown in answer.json()["error"]["message"]

    run(scene)


@pytest.mark.parametrize(
    ("problem", "vllm", "sglang"),
    [
        (ServerError("adapter 'sql' has already been loaded", "adapter_in_use"), (409, "invalid_request_error"), 409),
        (ServerError("adapter 'pirate' has already been loaded", "adapter_in_use"), (400, "InvalidUserInput"), 409),
        (ServerError("adapter directory x does not exist", "adapter_not_found"), (404, "NotFoundError"), 400),
        (ServerError("adapter_config.json is not valid", "adapter_error"), (400, "invalid_request_error"), 400),
        (ServerError("the path is outside", "forbidden"), (403, "invalid_request_error"), 403),
        (ServerError("adapter 'sql' is not known", "unknown_adapter"), (404, "NotFoundError"), 404),
    ],
)
def test_a_refused_change_has_vllm_s_status_and_type_on_its_paths_only(
    problem: ServerError, vllm: tuple[int, str], sglang: int
) -> None:
    """The first name does not exist: another change of it is in progress, which vLLM waits for."""

    class Refusing(FakeEngines):
        async def load_adapter(self, name: str, path: str, replace: bool) -> None:
            raise problem

        async def unload_adapter(self, name: str) -> None:
            raise problem

    async def scene() -> None:
        name = "pirate" if "pirate" in str(problem) else "sql"
        change, path = ("unload", {}) if "known" in str(problem) else ("load", {"lora_path": "/adapters/sql"})
        body = {"lora_name": name} | path
        async with gateway(Refusing()) as http:
            answer = await http.post(f"/v1/{change}_lora_adapter", json=body)
            error = answer.json()["error"]
            assert ((answer.status_code, error["type"]), error["message"]) == (vllm, str(problem))
            assert (await http.post(f"/{change}_lora_adapter", json=body)).status_code == sglang

    run(scene)
