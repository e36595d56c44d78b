"""Parts of answers leave at the end of a turn of the loop."""

import asyncio

from sidestream.runtime.gateway.serving.direct_body import DirectBody
from sidestream.runtime.gateway.serving.joined_writes import JoinedWrites
from sidestream.runtime.gateway.serving.turn import Turn
from support.written import Written

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_what_a_turn_adds_is_one_write_for_each_connection_and_comes_before_what_is_written_later() -> None:
    order: list[str] = []

    async def main() -> tuple[Written, Written]:
        turn = Turn()
        first = Written(lambda protocol, transport: order.append("first"))
        second = Written(lambda protocol, transport: order.append("second"))
        connections = [JoinedWrites(transport, turn) for transport in (first, second)]
        bodies = [DirectBody(connection) for connection in connections]
        for body in bodies:
            body.begin(HEAD)
        for part in (b"a", b"bc"):
            for body in bodies:
                body.write(part)
        assert not order, "the turn is not over"
        connections[1].write(b"later")
        await asyncio.sleep(0)
        bodies[0].write(b"d")
        await asyncio.sleep(0)
        return first, second

    first, second = asyncio.run(main())
    assert first.writes == [b"1\r\na\r\n2\r\nbc\r\n", b"1\r\nd\r\n"]
    assert second.writes == [b"1\r\na\r\n2\r\nbc\r\n", b"later"]
    assert order == ["second", "second", "first", "first"]


def test_only_a_body_in_chunks_can_be_written_directly() -> None:
    body = DirectBody(JoinedWrites(Written(lambda protocol, transport: None), Turn()))
    assert not body.ready, "it has not begun"
    body.begin(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
    assert not body.ready
    body.begin(HEAD)
    assert body.ready
