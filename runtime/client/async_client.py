"""`AsyncClient`: a client for asyncio programs. `docs/protocol.md` specifies the protocol."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from ..api.adapter_sum import AdapterChoice, is_sum, with_sum_names
from ..api.adapter_update import AdapterUpdate
from ..api.adapter_versions import AdapterVersion
from ..api.errors import EngineDeadError, ServerError
from ..api.lora_request import LoRARequest
from ..api.outputs import RequestOutput, ScoreOutput
from ..api.request import Continuation
from ..api.sampling_params import SamplingParams
from ..protocol import messages as protocol
from ..protocol.adapter_map import AdapterEntry
from ..protocol.addresses import AddressError, check_keys, default_address, parse
from ..protocol.chat_templates import adapter_templates, welcome_templates
from ..protocol.curve_keys import ClientKeys, load_client_keys
from ..protocol.messages import AdapterInfo, Adapters, Chunk, Health, KvPages, Message, Welcome
from ..text.chat_files import ChatTemplates
from ..text.chat_messages import as_conversations
from ..text.chat_renderer import ChatRenderer
from ..text.prompts import (
    Prompt,
    adds_special_tokens,
    as_list,
    one_for_each,
    text_or_ids,
    without_special_tokens,
)
from ..text.scoring import pair_requests, prompts_and_responses, score_output
from .connection import Connection
from .lora_requests import LoraRequests
from .requests import OutputAssembler, continuation_field, submission
from .update import SharedUpdate, check_shared, open_buffer

CONNECT_SECONDS = 10.0
CALL_SECONDS = 60.0
MAX_CONCURRENT_REQUESTS = 1024
_NOT_PROCESSED = ("wrong_instance", "hello_first")

T = TypeVar("T", bound=Message)


class AsyncClient:
    """A connection to `sidestream serve`, for one asyncio loop.

        async with AsyncClient() as client:
            async for chunk in client.stream("To be", SamplingParams(max_tokens=32), adapter="poetry"):
                print(chunk.text, end="")

    address          `ipc://...` or `tcp://host:port`; None: $SIDESTREAM_ADDRESS, or the default of `sidestream serve`
    keys             this client's folder of `sidestream keys curve`; needed for tcp beyond the loopback
    connect_timeout  seconds to wait for a server that does not run or still loads, before EngineDeadError
    call_timeout     seconds to wait for the answer to a call (adapters, stats, health) before TimeoutError
    silence_seconds  seconds without a message after which the engine counts as dead; None: the server's value. Detects
                     engines that hang and broken networks; the death of an engine process is detected at once
    on_lost          called within the loop, with the error, when an established connection breaks

    The client connects at its first use, and again at the first use after a lost connection. Requests that were open
    when the engine died raise EngineDeadError and are not repeated. It belongs to one loop and is not thread-safe.
    Chunks are queued in this process, so that a slow consumer does not delay others; max_tokens limits their number.

    Raises RequestError (invalid request), EngineDeadError, OverloadedError (try again later), DeadlineError,
    ServerError (other errors), TimeoutError.
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
            raise AddressError(f"{self.address} has no port to connect to")
        self.connect_timeout, self.call_timeout = connect_timeout, call_timeout
        self._request_numbers = itertools.count(1)
        self._renderer = ChatRenderer()
        self._updates = asyncio.Lock()  # they share the connection's buffer
        self._shared = SharedUpdate()
        self._lora_requests = LoraRequests(self.list_adapters, self.load_adapter)
        self._connection = Connection(self.address, client_keys, connect_timeout, silence_seconds, name)
        self._connection.on_lost = on_lost

    async def connect(self) -> Welcome:
        """Connect if not connected, and return the server's description. Other methods call it themselves.

        Raises EngineDeadError when nothing answers within connect_timeout.
        """
        return await self._connection.connect()

    async def close(self) -> None:
        """End the connection; open requests are aborted and raise EngineDeadError."""
        self._connection.close()
        self._renderer.close()
        self._shared.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.close()

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters for prompts without sampling_params: SamplingParams() with the values of the model's
        generation_config.json.
        """
        return (await self.connect()).sampling_defaults.params()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        adapter: AdapterChoice | None = None,
        *,
        priority: int = 0,
        deadline_seconds: float | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        stream: bool = True,
        continues: Sequence[Continuation] = (),
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate one prompt's answer in chunks; the last chunk has `usage`.

        The request is sent when the first chunk is awaited. Leaving early (break and aclose, cancellation) aborts it.

        timeout           seconds to wait for each chunk before TimeoutError
        deadline_seconds  seconds after which the server ends the request with DeadlineError
        request_id        id for `abort`, unique among this client's open requests
        stream            False: the server sends the answer when it is complete
        continues         state of each completion on another engine, which the chunks continue
        lora_request      in place of `adapter`, see `generate`
        """
        name = await self._lora_requests.resolve(adapter, lora_request)
        lists = self.stream_lists(
            prompt,
            sampling_params,
            name,
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
        scored: Sequence[tuple[int, int]] = (),
        prefill_only: bool = False,
        kv_pages: KvPages | None = None,
    ) -> AsyncGenerator[list[Chunk], None]:
        """Generate as `stream` does, in non-empty lists of the chunks that arrived together.

        when_accepted    called when the server has queued the request, with the number of prompt tokens and the
                         version of the adapter
        owner            user of the request, if the client serves several users; owners share steps fairly
        adapter_content  required version of the adapter; another version raises RequestError with code
                         `adapter_changed`
        direct           called within the loop with each chunk from the middle of the answer that arrives while the
                         next list is awaited. If it returns True, the chunk is not put into a list, and no task is
                         woken. An exception ends the stream. `timeout` applies to the time between lists
        scored           ranges of prompt tokens that earlier answers sampled, see `protocol.Submit`
        prefill_only     the first list has the `kv_pages` of the prompt, which the engine holds until this ends
        kv_pages         those of a prefill engine, see `protocol.Submit`
        """
        message = submission(
            request_id or f"r{next(self._request_numbers)}",
            prompt,
            sampling_params or await self.get_default_sampling_params(),
            adapter,
            stream=stream,
            priority=priority,
            deadline_seconds=deadline_seconds,
            continues=[continuation_field(so_far) for so_far in continues],
            owner=owner,
            adapter_content=adapter_content,
            scored=list(scored),
            prefill_only=prefill_only,
            kv_pages=kv_pages,
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
                # the server did not process the request, so it is sent again
                if attempt or request.accepted or problem.code not in _NOT_PROCESSED:
                    raise
            finally:
                self._connection.remove(request)

    async def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Generate the whole answers, in the order of the prompts, as `LLM.generate` does.

        sampling_params  one for all prompts, or a list with one for each
        adapter          the same: a name, or weights of a sum of adapters such as {"poetry": 0.7, "sql": 0.3}
        lora_request     the same, in place of `adapter`; the server loads an unknown adapter from the request's path, a
                         directory on its machine, and keeps it
        timeout          seconds for all prompts together, before TimeoutError

        The first error is raised, and the other requests are aborted. `prompt_token_ids` of a text prompt is empty,
        since the server tokenizes. `metrics` has times of this machine's clock.
        """
        items = as_list(prompts)
        adapter = await self._lora_requests.resolve(adapter, lora_request)
        lora_requests = one_for_each("lora_request", lora_request, LoRARequest, len(items), None)
        given = isinstance(sampling_params, SamplingParams)
        default = SamplingParams() if given else await self.get_default_sampling_params()
        params = one_for_each("sampling_params", sampling_params, SamplingParams, len(items), default)
        adapters = one_for_each("adapter", adapter, str, len(items), None)
        outputs = await self._complete(
            items, params, adapters, timeout, priority=priority, deadline_seconds=deadline_seconds
        )
        for output, lora in zip(outputs, lora_requests, strict=True):
            output.lora_request = lora
        return outputs

    async def score(
        self,
        prompts: Any,
        responses: Any,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
        top: int = 0,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
        timeout: float | None = None,
    ) -> list[ScoreOutput]:
        """Return the log-probabilities of responses to prompts, in the same order, as `LLM.score` does.

        Other arguments and errors are those of `generate`.
        """
        welcome = await self.connect()
        given, answers = prompts_and_responses(prompts, responses, top, welcome.max_logprobs, welcome.logprobs_mode)
        requests = pair_requests(
            [await self._token_ids(prompt, "prompt", index) for index, prompt in enumerate(given)],
            [await self._token_ids(response, "response", index) for index, response in enumerate(answers)],
            top,
            welcome.vocabulary,
            welcome.max_model_len,
        )
        adapter = await self._lora_requests.resolve(adapter, lora_request)
        adapters = one_for_each("adapter", adapter, str, len(requests), None)
        ids, scored, params = zip(*requests, strict=True) if requests else ((), (), ())
        outputs = await self._complete(
            ids, params, adapters, timeout, scored, priority=priority, deadline_seconds=deadline_seconds
        )
        return [score_output(output, top) for output in outputs]

    async def _token_ids(self, prompt: Prompt, noun: str, index: int) -> list[int]:
        """Return the token ids of a prompt, or of a response, which gets no special tokens."""
        text, ids = text_or_ids(prompt, f"{noun} {index}: ", noun)
        if text is None:
            return ids or []
        return await self.tokenize(text, noun == "prompt" and adds_special_tokens(prompt))

    async def _complete(
        self,
        items: Sequence[Prompt],
        params: Sequence[SamplingParams],
        adapters: Sequence[str | None],
        timeout: float | None,
        scored: Sequence[Sequence[tuple[int, int]]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Return the whole outputs of requests, see `generate`. `options`: of `stream_lists`."""
        limit = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

        async def complete_one(index: int) -> RequestOutput:
            async with limit:
                request_id = f"r{next(self._request_numbers)}"
                assembler = OutputAssembler(request_id, items[index], params[index], adapters[index])
                lists = self.stream_lists(
                    items[index],
                    params[index],
                    adapters[index],
                    request_id=request_id,
                    stream=False,
                    scored=() if scored is None else scored[index],
                    **options,
                )
                async with contextlib.aclosing(lists):
                    async for chunks in lists:
                        for chunk in chunks:
                            assembler.add(chunk)
                return assembler.output

        try:
            async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
                tasks = [group.create_task(complete_one(index)) for index in range(len(items))]
        except* Exception as problems:
            failure: BaseException = problems
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
        else:
            return [task.result() for task in tasks]
        raise failure

    async def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
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
        """Generate answers to one conversation or a list of them, as `LLM.chat` does; see there and `generate`.

        The server's template runs in a child process of this machine, with limits.
        """
        adapter = await self._lora_requests.resolve(adapter, lora_request)
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
        """Return the prompts that `chat` would send, for `stream`. `adapter`: one for all or a list; an adapter's own
        template has priority. `options`: the template's options of `chat`.
        """
        base = welcome_templates(await self.connect())
        conversations = as_conversations(messages)
        names = one_for_each("adapter", with_sum_names(adapter), str, len(conversations), None)
        adapters = {name for name in names if name is not None and not is_sum(name)}
        own = {name: await self.chat_templates(name) for name in adapters}
        templates = [own[name].over(base) if name in own else base for name in names]
        texts = await asyncio.to_thread(self._renderer.prompts, templates, conversations, **options)
        return [without_special_tokens(text) for text in texts]

    async def chat_templates(self, adapter: str, timeout: float | None = None) -> ChatTemplates:
        """Return the chat templates in an adapter's directory, possibly none."""
        return adapter_templates(
            await self._call(protocol.GetChatTemplates, protocol.ChatTemplatesFound, timeout, adapter=adapter)
        )

    async def abort(self, request_id: str) -> None:
        """Abort a request; its stream ends with a chunk of finish_reason `abort`. Ignores unknown ids."""
        self._connection.abort(request_id)

    async def load_adapter(
        self, name: str, path: str | Path, replace: bool = False, timeout: float | None = None
    ) -> None:
        """Load a PEFT adapter from a directory on the server's machine; `replace`: also if the name exists."""
        await self._call(protocol.LoadAdapter, protocol.Done, timeout, name=name, path=str(path), replace=replace)

    async def update_adapter(
        self,
        name: str,
        tensors: Mapping[str, Any],
        config: Any,
        version: int | None = None,
        inflight: Literal["pin", "switch"] = "pin",
        timeout: float | None = None,
    ) -> AdapterVersion:
        """Make tensors in memory the newest version of an adapter, as `LLM.update_adapter` does; see there.

        The tensors go through memory that is shared with the server, so the address must be ipc. Raises ServerError if
        the server refuses them.
        """
        check_shared(self.address)
        update = AdapterUpdate(tensors, config, inflight)
        async with self._updates:
            buffer = await self._call(protocol.OpenBuffer, protocol.Buffer, timeout, bytes=update.nbytes)
            await asyncio.to_thread(self._shared.write, update, self.address, buffer.path)
            return await self.apply_update(name, buffer.token, update.nbytes, version, inflight, timeout)

    async def open_update_buffer(self, nbytes: int) -> tuple[int, str]:
        """Return this connection's buffer for one update, as an open file that the caller closes, and its token; for
        gateways. The address must be ipc. Raises the errors of `update_adapter`.
        """
        buffer = await self._call(protocol.OpenBuffer, protocol.Buffer, None, bytes=nbytes)
        try:
            return open_buffer(self.address, buffer.path), buffer.token
        except OSError as problem:
            raise ServerError(f"the server's buffer cannot be opened: {problem.strerror}") from None

    async def apply_update(
        self,
        name: str,
        token: str,
        nbytes: int,
        version: int | None = None,
        inflight: Literal["pin", "switch"] = "pin",
        timeout: float | None = None,
    ) -> AdapterVersion:
        """Make the first bytes of this connection's buffer the newest version of an adapter; see `update_adapter`."""
        fields = {"name": name, "token": token, "bytes": nbytes, "version": version, "inflight": inflight}
        made = await self._call(protocol.UpdateAdapter, protocol.Updated, timeout, **fields)
        return AdapterVersion(made.name, made.version, made.content)

    async def unload_adapter(self, name: str, timeout: float | None = None) -> None:
        """Unload an adapter with all its versions, or an old version of it, such as `policy@3`."""
        await self._call(protocol.UnloadAdapter, protocol.Done, timeout, name=name)

    async def list_adapters(self, timeout: float | None = None) -> list[AdapterInfo]:
        """Return all adapters and whether they are on the GPU, in host memory or on disk."""
        return (await self.adapter_changes(timeout=timeout)).adapters

    async def adapter_changes(self, after: int = 0, timeout: float | None = None) -> Adapters:
        """Return all adapters, and the server's changes of adapters after number `after`; for gateways."""
        return await self._call(protocol.ListAdapters, protocol.Adapters, timeout, after=after)

    async def apply_adapter_entry(
        self, entry: AdapterEntry, replace: bool = True, timeout: float | None = None
    ) -> AdapterEntry | None:
        """Pass on a change of another server, and return the change that it replaced; for gateways.

        Raises RequestError `adapter_changed` if the server has a later one.
        """
        fields: dict[str, Any] = {"name": entry.name, "stamp": entry.stamp}
        if entry.path is None:
            return (await self._call(protocol.UnloadAdapter, protocol.Done, timeout, **fields)).replaced
        fields |= {"path": entry.path, "replace": replace, "content": entry.content}
        return (await self._call(protocol.LoadAdapter, protocol.Done, timeout, **fields)).replaced

    async def tokenize(self, text: str, add_special_tokens: bool = True, timeout: float | None = None) -> list[int]:
        """Return a text's token ids, as of a prompt; add_special_tokens=False: without BOS."""
        tokens = await self._call(
            protocol.Tokenize, protocol.Tokens, timeout, text=text, add_special_tokens=add_special_tokens
        )
        return tokens.token_ids

    async def token_spellings(
        self, text: str, add_special_tokens: bool = True, timeout: float | None = None
    ) -> list[tuple[int, str]]:
        """Return a text's tokens as in `tokenize`: id, and spelling in the vocabulary, such as `Ġthe`."""
        fields = {"text": text, "add_special_tokens": add_special_tokens, "spellings": True}
        tokens = await self._call(protocol.Tokenize, protocol.Tokens, timeout, **fields)
        return list(zip(tokens.token_ids, tokens.spellings, strict=True))

    async def token_offsets(
        self, text: str, add_special_tokens: bool = True, timeout: float | None = None
    ) -> list[tuple[int, tuple[int, int]]]:
        """Return a text's tokens as in `tokenize`: id, and the range of its characters as (start, end).

        Added special tokens have (0, 0). The tokens of one character that has several all have its range.
        """
        fields = {"text": text, "add_special_tokens": add_special_tokens, "offsets": True}
        tokens = await self._call(protocol.Tokenize, protocol.Tokens, timeout, **fields)
        ranges = zip(tokens.offsets[::2], tokens.offsets[1::2], strict=True)
        return list(zip(tokens.token_ids, ranges, strict=True))

    async def detokenize(
        self, token_ids: Sequence[int], timeout: float | None = None, *, skip_special_tokens: bool = False
    ) -> str:
        """Return the text of token ids, special tokens included by default."""
        fields = {"token_ids": list(token_ids), "skip_special_tokens": skip_special_tokens}
        return (await self._call(protocol.Detokenize, protocol.Text, timeout, **fields)).text

    async def pause(self, abort: bool = False, timeout: float | None = None) -> None:
        """Stop planning steps until `resume`. Returns when no step runs. Requests wait, with `abort` open ones end with
        ServerError `aborted`.
        """
        await self._call(protocol.Pause, protocol.Done, timeout, abort=abort)

    async def resume(self, timeout: float | None = None) -> None:
        """Plan steps again after `pause`."""
        await self._call(protocol.Resume, protocol.Done, timeout)

    async def stats(self, timeout: float | None = None) -> dict[str, int | float]:
        """Return the server's counters and gauges by name."""
        return (await self._call(protocol.GetStats, protocol.Stats, timeout)).values

    async def health(self, timeout: float | None = None) -> Health:
        """Return the server's health, also while it loads. Raises EngineDeadError without an answer in `timeout`."""
        seconds = self.connect_timeout if timeout is None else timeout
        try:
            return await self._connection.call(protocol.GetHealth, Health, seconds)
        except (TimeoutError, AddressError) as problem:
            raise EngineDeadError(f"nothing answers at {self.address}: {problem}", "engine_dead") from None

    async def _call(self, message: type[Message], reply: type[T], timeout: float | None, **fields: Any) -> T:
        seconds = self.call_timeout if timeout is None else timeout
        await self.connect()
        try:
            return await self._connection.call(message, reply, seconds, **fields)
        except EngineDeadError as problem:
            if problem.code not in _NOT_PROCESSED:
                raise
        await self.connect()
        return await self._connection.call(message, reply, seconds, **fields)
