"""Lets prefill engines compute the prompts of requests that decode engines answer."""

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

from ...api.adapter_sum import sum_parts
from ...api.errors import EngineDeadError, RequestError, ServerError
from ...api.sampling_params import SamplingParams
from ...protocol.messages import Chunk, KvPages
from ...text.prompts import Prompt, without_special_tokens
from ..interfaces import EngineRequest
from .engine_link import NOT_SERVING, EngineLink
from .load_balancer import LoadBalancer
from .prefix_index import PAGE_CHARACTERS, PAGE_TOKENS
from .stream_migration import MigratingStream

MAX_ATTEMPTS = 2
"""Prefill engines that a prompt is sent to, before a decode engine computes it: it may be the cause of their deaths."""
REQUEST_TOKENS = 1024
"""Prompt tokens that count as one request in the load of a prefill engine."""


def prompt_of(request: EngineRequest) -> Prompt:
    """Return a request's prompt for `AsyncClient`."""
    is_rendered = isinstance(request.prompt, str) and not request.add_special_tokens
    return without_special_tokens(str(request.prompt)) if is_rendered else request.prompt


class HeldPages:
    """The pages of a prompt, which a prefill engine holds while its stream is open.

    pages   None before `compute`, and after an error
    """

    def __init__(self, balancer: LoadBalancer, link: EngineLink, stream: AsyncGenerator[list[Chunk], None]) -> None:
        self.pages: KvPages | None = None
        self._balancer, self._link = balancer, link
        self._stream: AsyncGenerator[list[Chunk], None] | None = stream

    async def compute(self, request: EngineRequest, keys: Sequence[bytes]) -> None:
        """Wait until the engine holds the pages. An error leaves `pages` as None."""
        link, balancer, self._weight = self._link, self._balancer, max(1.0, num_tokens(request) / REQUEST_TOKENS)
        link.streams += 1
        balancer.start_request(link.name, request.adapter, keys, time.monotonic(), self._weight)
        try:
            for name, _ in () if request.adapter is None else sum_parts(request.adapter):
                await link.load_offered(name)
            if self._stream is not None:
                self.pages = (await anext(self._stream))[0].kv_pages
        except EngineDeadError as problem:
            link.on_request_error(problem)
        except (ServerError, RequestError, TimeoutError) as problem:
            if (code := getattr(problem, "code", "")) in NOT_SERVING:
                balancer.set_status(link.name, code, time.monotonic())
        finally:
            link.counts["prefills_total" if self.pages is not None else "prefills_failed_total"] += 1
            if self.pages is None:
                await self.release()

    async def release(self) -> None:
        """Let the engine overwrite the pages. May be called again."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()
            self._link.streams -= 1
            self._balancer.finish_request(self._link.name, self.pages is not None, time.monotonic(), self._weight)


class PrefillStage:
    """Chooses a prefill engine for each long prompt, and holds its pages until a decode engine has read them.

    Without a usable prefill engine, or after an error of one, the decode engine computes the prompt.

    min_tokens   fewer tokens that no decode engine has cached are left to the decode engine
    """

    def __init__(self, balancer: LoadBalancer, links: Mapping[str, EngineLink], min_tokens: int) -> None:
        self._balancer, self._links, self._min_tokens = balancer, links, min_tokens

    @contextlib.asynccontextmanager
    async def held_pages(
        self, request: EngineRequest, keys: Sequence[bytes], stream: MigratingStream, content: str, shares_base: bool
    ) -> AsyncGenerator[HeldPages | None, None]:
        """Return the pages of a request's prompt, or None. They are held in the block, or until `HeldPages.release`.

        `content`: required version of the adapter.
        """
        held, tried = None, set[str]()
        if any(link.is_prefill for link in self._links.values()) and self._is_worthwhile(request, keys):
            while (held is None or held.pages is None) and len(tried) < MAX_ATTEMPTS:
                decision = self._balancer.choose(
                    request.adapter, keys, time.monotonic(), tried, shares_base, prefill=True
                )
                if decision is None or decision.reason == "all stalled":
                    break
                tried.add(decision.engine)
                link = self._links[decision.engine]
                link.count_routing(decision.reason)
                lists = link.client.stream_lists(
                    prompt_of(request),
                    SamplingParams(),
                    request.adapter,
                    priority=request.priority,
                    deadline_seconds=stream.seconds_left(),
                    owner=request.owner,
                    adapter_content=content,
                    prefill_only=True,
                )
                held = HeldPages(self._balancer, link, lists)
                await held.compute(request, keys)
        try:
            yield None if held is None or held.pages is None else held
        finally:
            if held is not None:
                await held.release()

    def _is_worthwhile(self, request: EngineRequest, keys: Sequence[bytes]) -> bool:
        if request.params.prompt_logprobs is not None or request.params.skip_reading_prefix_cache:
            return False  # the decode engine computes the whole prompt
        return num_tokens(request) - PAGE_TOKENS * self._balancer.cached_pages(keys) >= self._min_tokens


def num_tokens(request: EngineRequest) -> int:
    """Return the tokens of a prompt; an estimate for a text."""
    length = len(request.prompt)
    return length * PAGE_TOKENS // PAGE_CHARACTERS if isinstance(request.prompt, str) else length
