"""A pending request without a socket: chunks for a waiting task, and chunks for a callback."""

import asyncio

import pytest
from sidestream.runtime.api.errors import ServerError
from sidestream.runtime.client.requests import PendingRequest
from sidestream.runtime.protocol.messages import Chunk, Usage


def chunk(first: int, last: bool = False) -> Chunk:
    return Chunk("r", 0, first, "x", [first], "length" if last else None, usage=Usage(1, first + 1) if last else None)


def test_chunks_come_in_order_by_either_way_and_each_by_one() -> None:
    arrived: list[tuple[str, int]] = []
    offered: list[int] = []

    def direct(chunk: Chunk) -> bool:
        offered.append(chunk.first)
        if chunk.first % 3 == 0:
            return False
        arrived.append(("direct", chunk.first))
        return True

    async def listen(request: PendingRequest) -> None:
        while not request.ended or arrived[-1][1] < 19:
            arrived.extend(("list", each.first) for each in await request.take(None))

    async def main() -> None:
        request = PendingRequest("r", direct=direct)
        listener = asyncio.create_task(listen(request))
        for first in range(20):
            request.put(chunk(first, first == 19))
            if first % 5 != 1:  # otherwise the next one comes before the task has run
                await asyncio.sleep(0)
        await listener

    asyncio.run(main())
    assert [first for _, first in arrived] == list(range(20))
    assert {way for way, _ in arrived} == {"direct", "list"}
    assert 0 not in offered and 19 not in offered, "nothing begins or ends with what is offered"
    assert 7 not in offered, "the task has not yet dealt with token 6"


def test_what_direct_raises_ends_the_stream() -> None:
    def direct(chunk: Chunk) -> bool:
        raise ValueError("callback failed")

    async def main() -> None:
        request = PendingRequest("r", direct=direct)
        request.put(chunk(0))
        assert [each.first for each in await request.take(None)] == [0]
        waiting = asyncio.create_task(request.take(None))
        await asyncio.sleep(0)
        request.put(chunk(1))
        with pytest.raises(ValueError, match="callback failed"):
            await waiting
        assert request.ended

    asyncio.run(main())


def test_a_gap_is_found_before_a_chunk_is_offered() -> None:
    async def main() -> None:
        request = PendingRequest("r", direct=lambda chunk: True)
        request.put(chunk(0))
        await request.take(None)
        waiting = asyncio.create_task(request.take(None))
        await asyncio.sleep(0)
        request.put(chunk(2))
        with pytest.raises(ServerError, match="tokens 1 to 2"):
            await waiting

    asyncio.run(main())
