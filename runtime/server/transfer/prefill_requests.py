"""Requests whose KV pages a prefill engine holds for a decode engine, until their client ends them."""

from ...api.outputs import RequestOutput
from ...protocol.messages import Chunk, KvPages
from ...scheduler.transfer.leased_pages import LeasedPages
from ..connections import Connections
from ..open_requests import OpenRequest, OpenRequests
from ..server_state import ServerState


class PrefillRequests:
    """Sends the places of a request's pages when they are saved, and releases the pages when the request ends.

    source   name of this engine's memory
    """

    def __init__(self, state: ServerState, connections: Connections, requests: OpenRequests, source: str) -> None:
        self._state, self._connections, self._requests, self._source = state, connections, requests, source
        self._computed: dict[str, tuple[OpenRequest, int]] = {}  # with their cached tokens; their pages are being saved
        requests.on_prefilled, requests.on_closed = self._prefilled, self._closed

    @property
    def _pages(self) -> LeasedPages | None:
        stepper = self._state.stepper
        host = None if stepper is None else stepper.scheduler.states.host
        return host if isinstance(host, LeasedPages) else None

    def answer(self) -> None:
        """Send the places of pages that have been saved, and end requests whose lease has expired."""
        pages = self._pages
        if pages is None:
            return
        for key in pages.take_expired():
            request = self._requests.get(key)
            if request is not None:
                self._requests.abort(request)
        for request, cached in list(self._computed.values()):
            places = pages.places(request.key)
            if places is not None:
                del self._computed[request.key]
                request.prefilled = True
                chunk = Chunk(request.request_id, 0, 0, "", [], kv_pages=KvPages(self._source, places, cached))
                self._connections.add_chunk(request.client, chunk)

    def _prefilled(self, request: OpenRequest, output: RequestOutput) -> None:
        self._computed[request.key] = request, output.num_cached_tokens

    def _closed(self, request: OpenRequest) -> None:
        self._computed.pop(request.key, None)
        if (pages := self._pages) is not None:
            pages.release(request.key)
