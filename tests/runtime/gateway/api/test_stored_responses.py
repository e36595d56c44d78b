"""Stored responses: OpenAI's client retrieves, continues, refers to, cancels and deletes them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from sidestream.runtime.gateway.api.responses import store as store_module
from sidestream.runtime.gateway.interfaces import Caller
from support.gateway import Books, FakeEngines, events, gateway
from support.scripted import ScriptedEngines

openai = pytest.importorskip("openai")

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content if m.content is string else m.content | map(attribute='text') | join('+') }}{% endfor %}"
    "<assistant>{# <think></think> #}"
)
PATH = "/v1/responses"


class Owners(Books):
    """Each key is an owner of its own."""

    def identify(self, authorization: str | None, host: str) -> Caller:
        return Caller(owner=authorization or "")


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


@asynccontextmanager
async def client(engines: FakeEngines, stored: int = 8, **given: Any) -> AsyncIterator[Any]:
    """OpenAI's client of a gateway that keeps so many responses."""
    async with gateway(engines, store_responses=stored, **given) as http:
        yield openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="a", http_client=http, max_retries=0)


async def until(reached: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    while not await reached():
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_is_retrieved_continued_and_deleted(stream: bool) -> None:
    async def scene() -> None:
        engines = ScriptedEngines(["<think>", "so", "</think>", "Ahoy"], template=TEMPLATE)
        async with client(engines) as ai:
            made = await ai.responses.create(model="base", input="Hi", instructions="Be brief.", stream=stream)
            if stream:
                async for event in made:
                    last = event
                made = last.response
            assert made.store is True
            assert (await ai.responses.retrieve(made.id)).to_dict() == made.to_dict()
            second = await ai.responses.create(model="base", input="And?", previous_response_id=made.id)
            assert second.previous_response_id == made.id
            third = await ai.responses.create(model="base", input="Then?", previous_response_id=second.id, store=False)
            assert third.store is False
            talk = "<user>Hi<assistant>(so)Ahoy<user>And?<assistant>"
            assert [each.prompt for each in engines.asked] == [
                "<system>Be brief.<user>Hi<assistant>",
                talk,  # instructions are of one response only
                f"{talk}(so)Ahoy<user>Then?<assistant>",
            ]
            with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
                await ai.responses.retrieve(third.id)
            await ai.responses.delete(made.id)
            with pytest.raises(openai.NotFoundError):
                await ai.responses.create(model="base", input="And?", previous_response_id=made.id)
            with pytest.raises(openai.BadRequestError, match="synchronous"):
                await ai.responses.cancel(second.id)
            with pytest.raises(openai.BadRequestError, match="stream"):
                await ai.responses.retrieve(second.id, stream=True)

    run(scene)


def test_references_are_to_items_of_stored_responses() -> None:
    """The AI SDK sends them for the items of earlier answers unless store is false."""

    async def scene() -> None:
        engines = ScriptedEngines(["<think>", "so", "</think>", "Ahoy"], template=TEMPLATE)
        async with client(engines) as ai:
            made = await ai.responses.create(model="base", input="Hi")
            known = [{"type": "item_reference", "id": item.id} for item in made.output]
            assert len(known) == 2
            talk = [{"role": "user", "content": "Hi"}, *known, {"role": "user", "content": "And?"}]
            await ai.responses.create(model="base", input=talk)
            assert engines.asked[1].prompt == "<user>Hi<assistant>(so)Ahoy<user>And?<assistant>"
            with pytest.raises(openai.BadRequestError, match=r"input\[0\].*'msg_9'.*store=false"):
                await ai.responses.create(model="base", input=[{"type": "item_reference", "id": "msg_9"}])

    run(scene)


def test_a_response_in_the_background_is_computed_after_its_request() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.gate.clear()
        async with client(engines) as ai:
            made = await ai.responses.create(model="base", input="Hi", background=True, max_output_tokens=3)
            assert (made.status, made.background, made.output) == ("queued", True, [])

            async def has(status: str) -> bool:
                return (await ai.responses.retrieve(made.id)).status == status

            await until(lambda: has("in_progress"))
            with pytest.raises(openai.ConflictError):
                await ai.responses.create(model="base", input="And?", previous_response_id=made.id)
            engines.gate.set()
            await until(lambda: has("incomplete"))
            assert (await ai.responses.retrieve(made.id)).output_text == "a b c "
            assert (await ai.responses.cancel(made.id)).status == "incomplete"

    run(scene)


def test_a_failed_response_in_the_background_has_its_error() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.problem = lambda request: RuntimeError("broken")
        async with client(engines) as ai:
            made = await ai.responses.create(model="base", input="Hi", background=True)

            async def has_failed() -> bool:
                return (await ai.responses.retrieve(made.id)).status == "failed"

            await until(has_failed)
            assert (await ai.responses.retrieve(made.id)).error.message

    run(scene)


@pytest.mark.parametrize("end", ["cancel", "delete"])
@pytest.mark.parametrize("begun", [False, True])
def test_cancelling_ends_the_request_of_the_engine(end: str, begun: bool) -> None:
    async def scene() -> None:
        engines, books = FakeEngines(), Books()
        engines.gate.clear()
        async with client(engines, 1, admission=books) as ai:
            made = await ai.responses.create(model="base", input="Hi", background=True)
            if begun:
                await until(lambda: asyncio.sleep(0, bool(engines.asked)))
                with pytest.raises(openai.RateLimitError, match="background"):
                    await ai.responses.create(model="base", input="Hi", background=True)
            ended = await getattr(ai.responses, end)(made.id)
            assert len(books.records) == (2 if begun else 1) and books.records[-1].error == "client_gone"
            assert len(engines.left) == len(engines.asked)
            if end == "cancel":
                assert ended.status == (await ai.responses.retrieve(made.id)).status == "cancelled"
            again = await ai.responses.create(model="base", input="Hi", background=True)  # there is room again
            await ai.responses.delete(again.id)

    run(scene)


def test_other_owners_neither_see_nor_displace_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def create(http: httpx.AsyncClient, key: str, text: str = "Hi", **body: Any) -> httpx.Response:
        headers = {"Authorization": key}
        return await http.post(PATH, json={"input": text, "max_output_tokens": 1} | body, headers=headers)

    async def scene() -> None:
        async with gateway(FakeEngines(), Owners(), store_responses=3) as http:

            async def status(key: str, response: str) -> int:
                return (await http.get(f"{PATH}/{response}", headers={"Authorization": key})).status_code

            mine = (await create(http, "a")).json()
            assert await status("a", mine["id"]) == 200 and await status("b", mine["id"]) == 404
            for method, path in (("DELETE", ""), ("POST", "/cancel")):
                refused = await http.request(method, f"{PATH}/{mine['id']}{path}", headers={"Authorization": "b"})
                assert refused.status_code == 404
            assert (await create(http, "b", previous_response_id=mine["id"])).status_code == 404
            reference = [{"type": "item_reference", "id": mine["output"][0]["id"]}]
            assert (await create(http, "b", reference)).status_code == 400
            others = [(await create(http, "b")).json()["id"] for _ in range(3)]
            assert [await status("b", each) for each in others] == [404, 200, 200]
            assert await status("a", mine["id"]) == 200
            monkeypatch.setattr(store_module, "MAX_STORED_BYTES", 5000)
            large = (await create(http, "b", "x" * 6000)).json()["id"]
            assert [await status("b", each) for each in [*others, large]] == [404] * 4
            assert await status("a", mine["id"]) == 200

    run(scene)


@pytest.mark.parametrize(
    ("stored", "body", "words"),
    [
        (0, {"background": True}, ("background", "--store-responses")),
        (0, {"previous_response_id": "resp_1"}, ("previous_response_id", "--store-responses")),
        (1, {"background": True, "store": False}, ("background", "`store`")),
        (1, {"background": True, "stream": True}, ("background", "stream")),
    ],
)
def test_contradictions_are_named(stored: int, body: dict[str, Any], words: tuple[str, ...]) -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines, store_responses=stored) as http:
            answer = await http.post(PATH, json={"input": "Hi"} | body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, words[0]), error
            assert all(word in error["message"] for word in words) and not engines.asked
            assert (await http.get(f"{PATH}/resp_1")).status_code == (404 if stored else 400)

    run(scene)


def test_without_the_option_nothing_is_stored() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            answer = (await http.post(PATH, json={"input": "Hi", "store": True, "background": False})).json()
            assert answer["store"] is False and answer["status"] == "incomplete", answer
            streamed = events((await http.post(PATH, json={"input": "Hi", "stream": True})).text)
            assert streamed[-1]["response"]["store"] is False

    run(scene)
