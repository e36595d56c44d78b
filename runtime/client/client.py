"""`Client`: speaks with a server from blocking code.

An `AsyncClient` on a loop in a thread of its own does the work, heartbeats included.
"""

import asyncio
import queue
import threading
import weakref
from collections.abc import Coroutine, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from ..api.errors import RequestError
from ..api.lora_request import LoRARequest
from ..api.outputs import RequestOutput
from ..api.sampling_params import SamplingParams
from ..processes.threads import start_thread
from ..protocol.curve_keys import ClientKeys
from ..protocol.messages import AdapterInfo, Chunk, Health, Welcome
from ..text.chat_files import ChatTemplates
from ..text.prompts import Prompt
from .async_client import CALL_SECONDS, CONNECT_SECONDS, AsyncClient

T = TypeVar("T")


class Client:
    """A connection to `sidestream serve`.

        with Client() as client:
            outputs = client.generate(["To be"], SamplingParams(max_tokens=32), adapter="poetry")
            for chunk in client.stream("To be", adapter="poetry"):
                print(chunk.text, end="")

    Arguments, errors and behaviour are those of `AsyncClient`. Thread-safe: any thread may call anything, and calls of
    several threads share the connection (an iterator of `stream` belongs to one thread at a time). Not usable in a
    forked child. Ctrl-C during a call aborts its requests.
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

    def connect(self) -> Welcome:
        """Connect, unless that is done; what the server is and may be asked. Every other call does it by itself."""
        return self._wait(self._client.connect())

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

    def get_default_sampling_params(self) -> SamplingParams:
        """See `AsyncClient.get_default_sampling_params`."""
        return self._wait(self._client.get_default_sampling_params())

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """The whole answers, in the order of the prompts; see `AsyncClient.generate`."""
        return self._wait(
            self._client.generate(
                prompts,
                sampling_params,
                adapter,
                lora_request=lora_request,
                priority=priority,
                deadline_seconds=deadline_seconds,
                timeout=timeout,
            )
        )

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or to a list of them; see `AsyncClient.chat`."""
        return self._wait(
            self._client.chat(
                messages,
                sampling_params,
                adapter,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                lora_request=lora_request,
                priority=priority,
                deadline_seconds=deadline_seconds,
                timeout=timeout,
            )
        )

    def chat_prompts(self, messages: Any, adapter: Any = None, **options: Any) -> list[Prompt]:
        """The prompts that `chat` would send, for `stream`; see `AsyncClient.chat_prompts`."""
        return self._wait(self._client.chat_prompts(messages, adapter, **options))

    def chat_templates(self, adapter: str, timeout: float | None = None) -> ChatTemplates:
        """The chat templates in an adapter's directory; see `AsyncClient.chat_templates`."""
        return self._wait(self._client.chat_templates(adapter, timeout))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        priority: int = 0,
        deadline_seconds: float | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Generator[Chunk, None, None]:
        """One prompt's answer as it grows; the last chunk has `usage`.

        Asked for at the first chunk; leaving early (break, close) aborts it.
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

    def abort(self, request_id: str) -> None:
        """End an open request by its id; its stream gets a last chunk with finish_reason `abort`.

        An id that is not open is ignored.
        """
        self._wait(self._client.abort(request_id))

    def load_adapter(self, name: str, path: str | Path, replace: bool = False, timeout: float | None = None) -> None:
        """Make a PEFT adapter in a directory on the server's machine usable as `name`; `replace`: also when the name
        is taken.
        """
        self._wait(self._client.load_adapter(name, path, replace, timeout))

    def unload_adapter(self, name: str, timeout: float | None = None) -> None:
        """Forget an adapter."""
        self._wait(self._client.unload_adapter(name, timeout))

    def list_adapters(self, timeout: float | None = None) -> list[AdapterInfo]:
        """All adapters that requests may name, and where they are."""
        return self._wait(self._client.list_adapters(timeout))

    def tokenize(self, text: str, add_special_tokens: bool = True, timeout: float | None = None) -> list[int]:
        """A text's ids, as the server makes them of a prompt; add_special_tokens=False: without BOS."""
        return self._wait(self._client.tokenize(text, add_special_tokens, timeout))

    def detokenize(self, token_ids: Sequence[int], timeout: float | None = None) -> str:
        """The text of ids, special tokens included."""
        return self._wait(self._client.detokenize(token_ids, timeout))

    def stats(self, timeout: float | None = None) -> dict[str, int | float]:
        """The server's counters and gauges, by name."""
        return self._wait(self._client.stats(timeout))

    def health(self, timeout: float | None = None) -> Health:
        """Whether requests are served; also answered while the engine loads.

        Raises EngineDeadError when nothing answers.
        """
        return self._wait(self._client.health(timeout))

    def _start(self, work: Coroutine[Any, Any, T]) -> Any:
        with self._lock:
            if self._closed:
                work.close()
                raise RequestError("this client is closed; make a new one")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # no effect unless the wait itself was interrupted
            raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a client's loop until it is stopped."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(client: AsyncClient, loop: asyncio.AbstractEventLoop, once: threading.Lock) -> None:
    """End a client's connection and its loop soon; may be called by any thread, and more than once."""
    if once.acquire(blocking=False):
        loop.call_soon_threadsafe(lambda: loop.create_task(_shut_down(client, loop)))


async def _shut_down(client: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
    try:
        await client.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for _ in range(3):
            await asyncio.sleep(0)  # those that wait report the end to their callers
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await loop.shutdown_asyncgens()
    finally:
        loop.stop()
