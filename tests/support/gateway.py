"""A gateway in the test's process: engines that answer what the test says, and an HTTP client that talks to the
application without a socket.

async with gateway(FakeEngines()) as http:
    await http.post("/v1/completions", json={"prompt": "x"})
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from sidestream.runtime.client.requests import is_plain
from sidestream.runtime.gateway.app import build_app
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.interfaces import (
    AdapterCard,
    Admission,
    EngineRequest,
    GatewayHealth,
    ModelInfo,
    Observer,
    PauseMode,
    UsageRecord,
)
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import CompositeObserver
from sidestream.runtime.gateway.server_process import listen, server_config
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.runtime.protocol.messages import Chunk, TokenLogprob, Usage
from sidestream.runtime.text.chat_files import ChatTemplates

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class FakeEngines:
    """Answers "a b c d " ... token by token; a request's tokens are 0, 1, 2, ...

    `problem` (of the request) is raised before the first token, `late` after the second. `gate`: no token comes before
    it is set. `asked`, `left`: requests, and the ids of those that were left before their end. `direct`: what is from
    the middle of an answer is offered to the request's `direct`; `taken` counts what it took. `context`: no answer has
    more tokens.
    """

    def __init__(self) -> None:
        self.asked: list[EngineRequest] = []
        self.left: list[str] = []
        self.direct, self.taken, self.context = True, 0, 1 << 20
        self.problem: Callable[[EngineRequest], Exception | None] = lambda request: None
        self.late: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.cards = [AdapterCard("pirate", 8, "aa"), AdapterCard("shout", 4, "bb")]
        self.status = GatewayHealth("ok")
        self.info = ModelInfo("base", 256, 4096, True, ChatTemplates({"default": TEMPLATE}), dtype="torch.bfloat16")
        self.calls: list[tuple[Any, ...]] = []

    async def start(self) -> None: ...

    def expect_shutdown(self) -> None: ...

    async def close(self) -> None: ...

    async def model(self) -> ModelInfo:
        return self.info

    async def stream(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        self.asked.append(request)
        ended = False
        try:
            await self.gate.wait()
            problem = self.problem(request)
            if problem is not None:
                ended = True
                raise problem
            if request.when_accepted is not None:
                card = next((card for card in self.cards if card.name == request.adapter), None)
                request.when_accepted(len(request.prompt), "" if card is None else card.content)
            count, n = self._tokens(request), request.params.n
            for token in range(len(request.continues[0].token_ids) if request.continues else 0, count):
                last = token == count - 1
                if token == 2 and self.late is not None:
                    ended = True
                    raise self.late
                ended = last
                chunks = [self._chunk(request, index, token, last, last and index == n - 1) for index in range(n)]
                left = [chunk for chunk in chunks if not self._taken(request, chunk)]
                self.taken += len(chunks) - len(left)
                if left:
                    yield left
                await asyncio.sleep(0)
        finally:
            if not ended:
                self.left.append(request.request_id)

    def _tokens(self, request: EngineRequest) -> int:
        return min(request.params.max_tokens or 4, self.context)

    def _taken(self, request: EngineRequest, chunk: Chunk) -> bool:
        return self.direct and is_plain(chunk) and request.direct is not None and request.direct(chunk)

    def _chunk(self, request: EngineRequest, index: int, token: int, last: bool, whole: bool) -> Chunk:
        params = request.params
        letter = chr(97 + token % 26)
        logprobs = None
        if params.logprobs is not None:
            ids = params.logprob_token_ids or range(token, token + max(1, params.logprobs))
            tops = [
                TokenLogprob(each, -0.5 - other, 1 + other, f"{chr(97 + each % 26)} ".encode())
                for other, each in enumerate(ids)
            ]
            logprobs = [tops]
        prompt = len(request.prompt)
        usage = Usage(prompt, self._tokens(request) * params.n, 1) if whole else None
        return Chunk(
            request.request_id,
            index,
            token,
            f"{letter} ",
            [token],
            "length" if last else None,
            None,
            logprobs,
            usage,
            text_offsets=None if logprobs is None else [2 * token],
        )

    async def adapters(self) -> list[AdapterCard]:
        return self.cards

    async def adapter(self, name: str) -> AdapterCard | None:
        return next((card for card in self.cards if card.name == name), None)

    async def load_adapter(self, name: str, path: str, replace: bool) -> None:
        self.calls.append(("load", name, path, replace))

    async def unload_adapter(self, name: str) -> None:
        self.calls.append(("unload", name))

    async def pause(self, mode: PauseMode) -> None:
        self.calls.append(("pause", mode))

    async def resume(self) -> None:
        self.calls.append(("resume",))

    async def health(self) -> GatewayHealth:
        return self.status

    async def stats(self) -> dict[str, dict[str, int | float]]:
        return {"engine": {"requests_total": len(self.asked)}}

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *map(ord, text)]

    async def token_spellings(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, str]]:
        return [(token, f"<{token}>") for token in await self.tokenize(text, add_special_tokens)]

    async def token_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, tuple[int, int]]]:
        first = int(add_special_tokens)
        ids = await self.tokenize(text, add_special_tokens)
        return [(token, (max(0, index - first), index + 1 - first)) for index, token in enumerate(ids)]

    async def detokenize(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token % 256) for token in token_ids)


class Books(NoAuth):
    """Lets everyone in, and keeps the usage records."""

    def __init__(self, api_key: str = "", limit: int | None = None) -> None:
        super().__init__(api_key)
        self.records: list[UsageRecord] = []
        self.limit = limit
        self.hidden: set[str] = set()

    def may_use(self, caller: Any, model: str) -> bool:
        return model not in self.hidden

    def admit(
        self, caller: Any, model: str, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
    ) -> Any:
        ticket = super().admit(caller, model, prompt_tokens, max_tokens, choices, model_len)
        if self.limit is not None:
            ticket.max_tokens = min(self.limit, max_tokens or self.limit)
        ticket.headers = {"x-ratelimit-limit-requests": "9"}
        ticket.finish = self.records.append
        return ticket


@asynccontextmanager
async def gateway(
    engines: FakeEngines,
    admission: Admission | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of an application over these engines."""
    app = build_app(
        engines, admission or NoAuth(), observer or CompositeObserver(Metrics()), GatewaySettings(**settings)
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        yield http


def events(text: str) -> list[Any]:
    """What the events of a stream hold; the end as "[DONE]"."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line.startswith("data: ")]
        if lines:
            data = lines[0].removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


@contextmanager
def listening(
    engines: FakeEngines, admission: Admission | None = None, loop: Any = "auto", **settings: Any
) -> Iterator[tuple[str, int]]:
    """An application over these engines that listens: (host, port). It runs in a thread, with uvicorn's `loop`."""
    made = GatewaySettings(port=0, **settings)
    app = build_app(engines, admission or NoAuth(), CompositeObserver(Metrics()), made)
    config = server_config(app, made, 1.0)
    config.loop = loop
    server = uvicorn.Server(config)

    def run() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listener]))

    with listen(made.host, made.port) as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        yield listener.getsockname()[:2]
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the gateway has to stop"
