"""`Client`: a client for blocking code. It runs an `AsyncClient` on an event loop in its own thread."""

import asyncio
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from ..api.adapter_sum import AdapterChoice
from ..api.errors import RequestError
from ..api.lora_request import LoRARequest
from ..api.sampling_params import SamplingParams
from ..processes.threads import start_thread
from ..protocol.curve_keys import ClientKeys
from ..protocol.messages import Chunk
from ..text.prompts import Prompt
from .async_client import CALL_SECONDS, CONNECT_SECONDS, AsyncClient

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    """Return a method of `Client` that calls the `AsyncClient` method and waits for its result."""

    @functools.wraps(method)
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(method(self._client, *args, **kwargs))

    return call


class Client:
    """A connection to `sidestream serve`.

        with Client() as client:
            outputs = client.generate(["To be"], SamplingParams(max_tokens=32), adapter="poetry")
            for chunk in client.stream("To be", adapter="poetry"):
                print(chunk.text, end="")

    Arguments, errors and behaviour are those of `AsyncClient`. Thread-safe: calls of several threads share the
    connection; an iterator of `stream` belongs to one thread at a time. A forked child needs one of its own. Ctrl-C
    during a call aborts its requests.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        keys: str | Path | ClientKeys | None = None,
        connect_timeout: float = CONNECT_SECONDS,
        call_timeout: float = CALL_SECONDS,
        silence_seconds: float | None = None,
        name: str = "",
    ) -> None:
        self._client = AsyncClient(
            address,
            keys=keys,
            connect_timeout=connect_timeout,
            call_timeout=call_timeout,
            silence_seconds=silence_seconds,
            name=name,
        )
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        stop = partial(_stop, self._client, self._loop, threading.Lock())
        self._thread = start_thread(_run, self._loop, name="sidestream-client", stop=stop)
        self._end = weakref.finalize(self, stop)
        self._end.atexit = False

    def close(self) -> None:
        """End the connection and the thread; open requests are aborted and raise EngineDeadError.

        May be called twice.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    connect = _blocking(AsyncClient.connect)
    get_default_sampling_params = _blocking(AsyncClient.get_default_sampling_params)
    generate = _blocking(AsyncClient.generate)
    score = _blocking(AsyncClient.score)
    chat = _blocking(AsyncClient.chat)
    chat_prompts = _blocking(AsyncClient.chat_prompts)
    chat_templates = _blocking(AsyncClient.chat_templates)
    abort = _blocking(AsyncClient.abort)
    load_adapter = _blocking(AsyncClient.load_adapter)
    update_adapter = _blocking(AsyncClient.update_adapter)
    unload_adapter = _blocking(AsyncClient.unload_adapter)
    list_adapters = _blocking(AsyncClient.list_adapters)
    tokenize = _blocking(AsyncClient.tokenize)
    token_spellings = _blocking(AsyncClient.token_spellings)
    token_offsets = _blocking(AsyncClient.token_offsets)
    detokenize = _blocking(AsyncClient.detokenize)
    pause = _blocking(AsyncClient.pause)
    resume = _blocking(AsyncClient.resume)
    stats = _blocking(AsyncClient.stats)
    health = _blocking(AsyncClient.health)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        adapter: AdapterChoice | None = None,
        *,
        priority: int = 0,
        deadline_seconds: float | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Generator[Chunk, None, None]:
        """Generate one prompt's answer in chunks; the last chunk has `usage`.

        The request is sent when the first chunk is requested; leaving early (break, close) aborts it.
        """
        chunks = self._client.stream(
            prompt,
            sampling_params,
            adapter,
            priority=priority,
            deadline_seconds=deadline_seconds,
            timeout=timeout,
            request_id=request_id,
            lora_request=lora_request,
        )
        arrived: queue.SimpleQueue[Chunk | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for chunk in chunks:
                    arrived.put(chunk)
            except BaseException as problem:
                arrived.put(problem)
                raise
            else:
                arrived.put(None)
            finally:
                await chunks.aclose()

        pumping = self._start(pump())
        try:
            while (item := arrived.get()) is not None:
                if isinstance(item, asyncio.CancelledError):
                    raise RequestError("this client was closed while a stream was open")
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pumping.cancel()

    def _start(self, work: Coroutine[Any, Any, T]) -> Any:
        with self._lock:
            if self._closed:
                work.close()
                raise RequestError("this client is closed; make a new one")
            if not self._thread.is_alive():  # a fork copies no threads
                work.close()
                raise RequestError("this client belongs to the process that made it; make one in each process")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # no effect unless the wait itself was interrupted
            raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(client: AsyncClient, loop: asyncio.AbstractEventLoop, once: threading.Lock) -> None:
    """End a client's connection and its loop soon. Any thread may call it, more than once."""
    if once.acquire(blocking=False):
        loop.call_soon_threadsafe(lambda: loop.create_task(_shut_down(client, loop)))


async def _shut_down(client: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
    try:
        await client.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for _ in range(3):
            await asyncio.sleep(0)  # waiting tasks report the end to their callers
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await loop.shutdown_asyncgens()
    finally:
        loop.stop()
