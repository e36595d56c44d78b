"""`AsyncClient`: speaks with a server from an asyncio program. `docs/protocol.md` says what goes over the wire."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from ..api.errors import EngineDeadError
from ..api.lora_request import LoRARequest
from ..api.outputs import RequestOutput
from ..api.request import Continuation
from ..api.sampling_params import SamplingParams
from ..protocol import messages as protocol
from ..protocol.addresses import AddressError, check_keys, default_address, parse
from ..protocol.curve_keys import ClientKeys, load_client_keys
from ..protocol.messages import AdapterInfo, Chunk, Health, Message, Welcome
from ..protocol.templates import adapter_templates, welcome_templates
from ..text.chat import ChatRenderer
from ..text.chat_files import ChatTemplates
from ..text.chat_messages import as_conversations
from ..text.prompts import Prompt, as_list, one_for_each, without_special_tokens
from .connection import Connection
from .lora_requests import LoraRequests
from .requests import Assembly, continued, submission

CONNECT_SECONDS = 10.0
CALL_SECONDS = 60.0
MANY = 1024
_UNHEARD = ("wrong_instance", "hello_first")

T = TypeVar("T", bound=Message)


class AsyncClient:
    """A connection to `sidestream serve`, for one asyncio loop.

        async with AsyncClient() as client:
            async for chunk in client.stream("To be", SamplingParams(max_tokens=32), adapter="poetry"):
                print(chunk.text, end="")

    address          `ipc://...` or `tcp://host:port`; None: $SIDESTREAM_ADDRESS, or where `sidestream serve` listens by
                     default
    keys             this client's folder of `sidestream keys curve`; needed for tcp beyond the loopback
    connect_timeout  seconds to wait for a server that is not there, or still loads, before EngineDeadError
    call_timeout     seconds to wait for the answer to a call (adapters, stats, health) before TimeoutError
    silence_seconds  after so many seconds without a sign of life the engine counts as dead; None: what the server
                     names. A killed engine is noticed at once, as its connection breaks; this is for one that hangs or
                     a network that is gone.
    on_lost          is called, within the loop, when a connection that was made breaks, with what is known about it

    It connects at the first use, and again at the first use after a loss. What was open when the engine died raises
    EngineDeadError and is not repeated. Belongs to one loop and is not thread-safe: other threads use `Client`, or a
    client of their own. Chunks are taken off the wire at once and wait in this process, so a slow consumer holds up
    nobody; an answer's size is bounded by its max_tokens.

    Raises RequestError (a fault of the request), EngineDeadError, OverloadedError (try again later), DeadlineError,
    ServerError (all others), TimeoutError.
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
        on_lost: Callable[[Exception], None] | None = None,
    ) -> None:
        self.address = parse(default_address() if address is None else address)
        client_keys = load_client_keys(keys) if isinstance(keys, (str, Path)) else keys
        check_keys(self.address, client_keys is not None)
        if self.address.scheme == "tcp" and self.address.port == 0:
            raise AddressError(f"{self.address} names no port to connect to")
        self.connect_timeout, self.call_timeout = connect_timeout, call_timeout
        self._requests_made = itertools.count(1)
        self._renderer = ChatRenderer()
        self._lora_requests = LoraRequests(self.list_adapters, self.load_adapter)
        self._connection = Connection(self.address, client_keys, connect_timeout, silence_seconds, name)
        self._connection.on_lost = on_lost

    async def connect(self) -> Welcome:
        """Connect, unless that is done; what the server is and may be asked.

        Raises EngineDeadError when nothing answers within connect_timeout.
        """
        return await self._connection.connect()

    async def close(self) -> None:
        """End the connection; open requests are aborted and raise EngineDeadError."""
        self._connection.close()
        self._renderer.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.close()

    async def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of prompts without sampling_params: SamplingParams() with what the model's
        generation_config.json sets. Given parameters are sent as they are.
        """
        return (await self.connect()).sampling_defaults.params()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        priority: int = 0,
        deadline_seconds: float | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        stream: bool = True,
        continues: Sequence[Continuation] = (),
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """One prompt's answer as it grows; the last chunk has `usage`. It is asked for at the first chunk that is
        awaited.

        Leaving early (break and aclose, cancellation) aborts the request. `timeout`: longest wait for a chunk, in
        seconds, before TimeoutError. `deadline_seconds`: the server ends the request then, with DeadlineError.
        `request_id`: for `abort`, unique among this client's open requests. `stream=False`: the server sends the answer
        when it is complete. `continues`: what another engine made of each completion already; the chunks go on from
        there. `lora_request`: instead of `adapter`, see `generate`.
        """
        adapter = await self._lora_requests.names(adapter, lora_request)
        lists = self.stream_lists(
            prompt,
            sampling_params,
            adapter,
            priority=priority,
            deadline_seconds=deadline_seconds,
            timeout=timeout,
            request_id=request_id,
            stream=stream,
            continues=continues,
        )
        async with contextlib.aclosing(lists):
            async for chunks in lists:
                for chunk in chunks:
                    yield chunk

    async def stream_lists(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        priority: int = 0,
        deadline_seconds: float | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        stream: bool = True,
        continues: Sequence[Continuation] = (),
        when_accepted: Callable[[int, str], None] | None = None,
        owner: str = "",
        adapter_content: str = "",
        direct: Callable[[Chunk], bool] | None = None,
    ) -> AsyncGenerator[list[Chunk], None]:
        """As `stream`, with the chunks that have arrived together as one list, which is never empty.

        `when_accepted` is called when the server has taken the request, with the number of the prompt's tokens and the
        version of the adapter that answers. `owner`: for whom the request is, where a client asks for several; the
        server's steps are shared fairly between them. `adapter_content`: the version that the adapter has to be;
        another one is a RequestError with the code `adapter_changed`. `direct` is called, within the loop, with each
        chunk from the middle of the answer that arrives while the next list is awaited: one for which it returns True
        is in no list, and no task is woken for it; `timeout` counts between lists. What it raises ends the stream.
        """
        message = submission(
            request_id or f"r{next(self._requests_made)}",
            prompt,
            sampling_params or await self.get_default_sampling_params(),
            adapter,
            stream=stream,
            priority=priority,
            deadline_seconds=deadline_seconds,
            continues=[continued(so_far) for so_far in continues],
            owner=owner,
            adapter_content=adapter_content,
        )
        for attempt in range(2):
            await self.connect()
            request = self._connection.submit(message, when_accepted, direct)
            try:
                while True:
                    chunks = await request.take(timeout)
                    yield chunks
                    if chunks[-1].usage is not None:
                        return
            except EngineDeadError as problem:
                # a request that was never heard may be sent again
                if attempt or request.accepted or problem.code not in _UNHEARD:
                    raise
            finally:
                self._connection.leave(request)

    async def generate(
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
        """The whole answers, in the order of the prompts, as `LLM.generate` gives them.

        `prompt_token_ids` of a text prompt is empty: the server tokenizes, and a long prompt's ids would be larger than
        its answer. Times in `metrics` are those of this machine's clock. Request ids are not used twice.

        sampling_params and adapter are one for all prompts, or a list of one for each; so is `lora_request`, which may
        stand for adapter: an adapter that the server does not know is loaded from its path, a directory on the server's
        machine, and stays. `timeout`: seconds for all together, before TimeoutError. The first error is raised, and the
        other requests are aborted.
        """
        items = as_list(prompts)
        adapter = await self._lora_requests.names(adapter, lora_request)
        asked = one_for_each("lora_request", lora_request, LoRARequest, len(items), None)
        given = isinstance(sampling_params, SamplingParams)
        usual = SamplingParams() if given else await self.get_default_sampling_params()
        params = one_for_each("sampling_params", sampling_params, SamplingParams, len(items), usual)
        adapters = one_for_each("adapter", adapter, str, len(items), None)
        at_once = asyncio.Semaphore(MANY)

        async def one(index: int) -> RequestOutput:
            async with at_once:
                request_id = f"r{next(self._requests_made)}"
                assembly = Assembly(request_id, items[index], params[index], adapters[index])
                chunks = self.stream(
                    items[index],
                    params[index],
                    adapters[index],
                    priority=priority,
                    deadline_seconds=deadline_seconds,
                    request_id=request_id,
                    stream=False,
                )
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        assembly.add(chunk)
                assembly.output.lora_request = asked[index]
                return assembly.output

        try:
            async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(index)) for index in range(len(items))]
        except* Exception as problems:
            first: BaseException = problems
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            failure = first
        else:
            return [task.result() for task in tasks]
        raise failure

    async def chat(
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
        """Answers to one conversation or to a list of them, as `LLM.chat` gives them. The template that the server
        reports is run here, in a child process with limits; see `LLM.chat` for its options, `generate` for the others.
        """
        adapter = await self._lora_requests.names(adapter, lora_request)
        prompts = await self.chat_prompts(
            messages,
            adapter,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return await self.generate(
            prompts,
            sampling_params,
            None if lora_request is not None else adapter,
            lora_request=lora_request,
            priority=priority,
            deadline_seconds=deadline_seconds,
            timeout=timeout,
        )

    async def chat_prompts(self, messages: Any, adapter: Any = None, **options: Any) -> list[Prompt]:
        """The prompts that `chat` would send, for `stream`; `adapter`: one for all or one for each, its own template
        is used if it has one; `options`: those of `chat` that the template sees.
        """
        base = welcome_templates(await self.connect())
        conversations = as_conversations(messages)
        names = one_for_each("adapter", adapter, str, len(conversations), None)
        own = {name: await self.chat_templates(name) for name in dict.fromkeys(names) if name is not None}
        templates = [base if name is None else own[name].over(base) for name in names]
        texts = await asyncio.to_thread(self._renderer.prompts, templates, conversations, **options)
        return [without_special_tokens(text) for text in texts]

    async def chat_templates(self, adapter: str, timeout: float | None = None) -> ChatTemplates:
        """The chat templates in an adapter's directory; none if it has none of its own."""
        return adapter_templates(
            await self._call(
                lambda call: protocol.GetChatTemplates(call=call, adapter=adapter), protocol.ChatTemplatesFound, timeout
            )
        )

    async def abort(self, request_id: str) -> None:
        """End an open request; its stream gets a last chunk with finish_reason `abort`.

        An id that is not open is ignored.
        """
        self._connection.abort(request_id)

    async def load_adapter(
        self, name: str, path: str | Path, replace: bool = False, timeout: float | None = None
    ) -> None:
        """Make a PEFT adapter in a directory on the server's machine usable as `name`; `replace`: also when the name
        is taken.
        """
        await self._call(
            lambda call: protocol.LoadAdapter(call=call, name=name, path=str(path), replace=replace),
            protocol.Done,
            timeout,
        )

    async def unload_adapter(self, name: str, timeout: float | None = None) -> None:
        """Forget an adapter."""
        await self._call(lambda call: protocol.UnloadAdapter(call=call, name=name), protocol.Done, timeout)

    async def list_adapters(self, timeout: float | None = None) -> list[AdapterInfo]:
        """All adapters that requests may name, and where they are."""
        return (await self._call(lambda call: protocol.ListAdapters(call=call), protocol.Adapters, timeout)).adapters

    async def tokenize(self, text: str, add_special_tokens: bool = True, timeout: float | None = None) -> list[int]:
        """A text's ids, as the server makes them of a prompt; add_special_tokens=False: without BOS."""
        return (
            await self._call(
                lambda call: protocol.Tokenize(call=call, text=text, add_special_tokens=add_special_tokens),
                protocol.Tokens,
                timeout,
            )
        ).token_ids

    async def detokenize(self, token_ids: Sequence[int], timeout: float | None = None) -> str:
        """The text of ids, special tokens included."""
        return (
            await self._call(
                lambda call: protocol.Detokenize(call=call, token_ids=list(token_ids)), protocol.Text, timeout
            )
        ).text

    async def stats(self, timeout: float | None = None) -> dict[str, int | float]:
        """The server's counters and gauges, by name."""
        return (await self._call(lambda call: protocol.GetStats(call=call), protocol.Stats, timeout)).values

    async def health(self, timeout: float | None = None) -> Health:
        """Whether requests are served; also answered while the engine loads.

        Raises EngineDeadError when nothing answers within `timeout`.
        """
        try:
            return await self._connection.ask(
                lambda call: protocol.GetHealth(call=call), Health, self.connect_timeout if timeout is None else timeout
            )
        except (TimeoutError, AddressError) as problem:
            raise EngineDeadError(f"nothing answers at {self.address}: {problem}", "engine_dead") from None

    async def _call(self, make: Callable[[int], Message], kind: type[T], timeout: float | None) -> T:
        seconds = self.call_timeout if timeout is None else timeout
        await self.connect()
        try:
            return await self._connection.ask(make, kind, seconds)
        except EngineDeadError as problem:
            if problem.code not in _UNHEARD:
                raise
        await self.connect()
        return await self._connection.ask(make, kind, seconds)
