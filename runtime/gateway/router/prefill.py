"""Lets prefill engines compute the prompts of requests that decode engines answer."""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

from ...api.adapter_sum import sum_parts
from ...api.errors import EngineDeadError, OverloadedError, RequestError, ServerError
from ...api.sampling_params import SamplingParams
from ...protocol.messages import Chunk, KvPages
from ...text.prompts import without_special_tokens
from ..interfaces import EngineRequest
from .engine_link import NOT_SERVING, EngineLink
from .load_balancer import LoadBalancer
from .prefix_index import PAGE_CHARACTERS, PAGE_TOKENS
from .stream_migration import MigratingStream

_log = logging.getLogger(__name__)
MAX_ATTEMPTS = 2
"""Prefill engines that a prompt is sent to, before a decode engine computes it: it may be the cause of their deaths."""
REQUEST_TOKENS = 1024
"""Prompt tokens that count as one request in the load of a prefill engine."""
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


class HeldPages:
    """The pages of a prompt, which an engine holds until `release`. `pages`: None if there are none."""

    def __init__(self, pages: KvPages | None = None, release: Callable[[], Awaitable[None]] | None = None) -> None:
        self.pages = pages
        self._release = release

    async def release(self) -> None:
        """Let the engine overwrite the pages. May be called again."""
        release, self._release = self._release, None
        if release is not None:
            await release()


class PrefillStage:
    """Chooses a prefill engine for each long prompt, and holds its pages until a decode engine has read them.

    Without a usable prefill engine, or after an error of one, the decode engine computes the prompt.

    min_tokens   fewer tokens that no decode engine has cached are left to the decode engine
    """

    def __init__(self, balancer: LoadBalancer, links: Mapping[str, EngineLink], min_tokens: int) -> None:
        self._balancer, self._links, self._min_tokens = balancer, links, min_tokens

    @contextlib.asynccontextmanager
    async def held_pages(
        self,
        request: EngineRequest,
        keys: Sequence[bytes],
        stream: MigratingStream,
        required_content: str,
        shares_base: bool,
    ) -> AsyncGenerator[HeldPages, None]:
        """Return the pages of a request's prompt. They are held within the block, or until `HeldPages.release`."""
        held = HeldPages()
        if any(link.is_prefill for link in self._links.values()) and self._is_worthwhile(request, keys):
            held = await self._compute(request, keys, stream, required_content, shares_base)
        try:
            yield held
        finally:
            await held.release()

    def _is_worthwhile(self, request: EngineRequest, keys: Sequence[bytes]) -> bool:
        if request.params.prompt_logprobs is not None or request.params.skip_reading_prefix_cache:
            return False  # the decode engine computes the whole prompt
        return _num_tokens(request) - PAGE_TOKENS * self._balancer.cached_pages(keys) >= self._min_tokens

    async def _compute(
        self,
        request: EngineRequest,
        keys: Sequence[bytes],
        stream: MigratingStream,
        required_content: str,
        shares_base: bool,
    ) -> HeldPages:
        """Let an engine compute the prompt, and another one if that fails."""
        tried: set[str] = set()
        while len(tried) < MAX_ATTEMPTS:
            now = time.monotonic()
            decision = self._balancer.choose(request.adapter, keys, now, tried, shares_base, prefill=True)
            if decision is None or decision.reason == "all stalled":
                break
            tried.add(decision.engine)
            link = self._links[decision.engine]
            weight = max(1.0, _num_tokens(request) / REQUEST_TOKENS)
            link.counts[f"routed_{decision.reason.replace(':', '').replace(' ', '_')}_total"] += 1
            link.streams += 1
            self._balancer.start_request(link.name, request.adapter, keys, now, weight)
            lists = self._stream(link, request, stream, required_content)

            async def release(
                link: EngineLink = link,
                lists: AsyncGenerator[list[Chunk], None] = lists,
                weight: float = weight,
                held: bool = True,
            ) -> None:
                await lists.aclose()
                link.streams -= 1
                if self._links.get(link.name) is link:
                    self._balancer.finish_request(link.name, held, time.monotonic(), weight)

            pages: KvPages | None = None
            try:
                for name, _ in () if request.adapter is None else sum_parts(request.adapter):
                    await link.load_offered(name)
                pages = (await anext(lists))[0].kv_pages
            except EngineDeadError as problem:
                link.on_request_error(problem)
            except (ServerError, RequestError, TimeoutError) as problem:
                if isinstance(problem, OverloadedError) and problem.code in NOT_SERVING:
                    self._balancer.set_status(link.name, problem.code, time.monotonic())
                _log.debug("%s does not compute a prompt: %s", link.name, problem)
            finally:
                if pages is None:
                    link.counts["prefills_failed_total"] += 1
                    await release(held=False)
            if pages is not None:
                link.counts["prefills_total"] += 1
                return HeldPages(pages, release)
        return HeldPages()

    def _stream(
        self, link: EngineLink, request: EngineRequest, stream: MigratingStream, required_content: str
    ) -> AsyncGenerator[list[Chunk], None]:
        is_rendered = isinstance(request.prompt, str) and not request.add_special_tokens
        return link.client.stream_lists(
            without_special_tokens(str(request.prompt)) if is_rendered else request.prompt,
            _PARAMS,
            request.adapter,
            priority=request.priority,
            deadline_seconds=stream.seconds_left(),
            owner=request.owner,
            adapter_content=required_content,
            prefill_only=True,
        )


def _num_tokens(request: EngineRequest) -> int:
    """Return the tokens of a prompt; an estimate for a text."""
    length = len(request.prompt)
    return length * PAGE_TOKENS // PAGE_CHARACTERS if isinstance(request.prompt, str) else length
