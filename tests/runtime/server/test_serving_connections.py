"""Flow control: unread chunks are queued and joined up to a limit; then the client's requests end."""

import select
import time

import pytest
import zmq
from sidestream.runtime.api.outputs import CompletionOutput, Logprob, RequestOutput
from sidestream.runtime.api.request import Delta
from sidestream.runtime.protocol.addresses import parse
from sidestream.runtime.protocol.framing import decode_from_server, encode
from sidestream.runtime.protocol.messages import MAX_FRAME_BYTES, Beat, Chunk, Chunks, Error, Hello, TokenLogprob
from sidestream.runtime.server import connections
from sidestream.runtime.server.connections import Connections
from sidestream.runtime.server.listener import OpenListener
from sidestream.runtime.server.open_requests import OpenRequests
from support.serving import GUARD


@pytest.fixture
def ends(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "MAX_PENDING_BYTES", 200_000)
    context = zmq.Context()
    listener = OpenListener(parse(f"ipc://{tmp_path}/s"))
    dealers = []

    def connect() -> zmq.Socket:
        dealer = context.socket(zmq.DEALER)
        dealer.rcvhwm, dealer.linger = 1, 0
        dealer.connect(f"ipc://{tmp_path}/s")
        dealer.send(encode(Hello()))
        dealers.append(dealer)
        return dealer

    yield Hub(listener, bytes(16)), connect
    listener.close(0)
    context.destroy(linger=0)


class Hub(Connections):
    """With the listener's side of the batcher's loop."""

    def flush(self):
        self.receive()
        super().flush()

    def receive(self):
        self._listener.poll()
        for identity in self._listener.take_disconnected():
            self.disconnected(identity)


def join(hub, dealer):
    while (arrived := hub._listener.receive()) is None:
        select.select([hub._listener.source], [], [], 1.0)
        hub.receive()
    return hub.client_of(arrived[0])


def read(dealer, count, hub=None):
    """So many messages, and what else is there by then; `hub` is flushed meanwhile."""
    messages, end = [], time.monotonic() + GUARD
    while len(messages) < count or dealer.poll(0):
        assert time.monotonic() < end, f"{len(messages)} of {count} messages"
        if hub is not None:
            hub.flush()
        if dealer.poll(10):
            messages.append(decode_from_server(dealer.recv()).message)
    return messages


def test_chunks_of_a_step_travel_together_and_in_order(ends):
    hub, connect = ends
    dealer = connect()
    client = join(hub, dealer)
    for step in range(3):
        for request in range(40):
            hub.add_chunk(client, Chunk(f"r{request}", 0, step, "x", [step]))
        hub.flush()
    hub.send(client, Beat())
    messages = read(dealer, 4)
    assert [type(message) for message in messages] == [Chunks, Chunks, Chunks, Beat]
    assert [chunk.first for message in messages[:3] for chunk in message.chunks] == [0] * 40 + [1] * 40 + [2] * 40
    hub.flush()
    assert not hub.has_output


def test_unread_chunks_are_joined_and_then_dropped(ends):
    hub, connect = ends
    dealer = connect()
    client = join(hub, dealer)
    other = connect()
    reader = join(hub, other)
    step = 0
    while not hub.slow_total:
        for request in range(50):
            hub.add_chunk(client, Chunk(f"r{request}", 0, step, "x" * 200, [step]))
        hub.add_chunk(reader, Chunk("q", 0, step, "", [step]))
        hub.flush()
        (message,) = read(other, 1, hub)
        assert [chunk.first for chunk in message.chunks] == [step], "others do not wait"
        step += 1
        assert step < 5000
        assert client.chunk_bytes + client.frame_bytes < 500_000, "bounded"
        assert len(client.chunks) <= 51 * (1 + step // 256) + 50
    assert hub.take_lost() == [client]
    hub.add_chunk(client, Chunk("r0", 0, step, "more", [1]))
    messages = []
    while not (messages and isinstance(messages[-1], Error)):
        messages += read(dealer, 1, hub)
    assert [message.code for message in messages if isinstance(message, Error)] == ["slow_reader"]
    hub.flush()
    hub.add_chunk(client, Chunk("new", 0, 0, "again", [1]))
    hub.flush()
    assert read(dealer, 1, hub)[-1].chunks[0].text == "again", "a client that reads again is served again"


def test_log_probabilities_of_prompts_are_not_joined(ends):
    """Joined they could come to more than a frame holds."""
    hub, connect = ends
    client = join(hub, connect())
    client.blocked = True
    scores = [[TokenLogprob(token, -1.5, 3, b"text") for token in range(21)]] * 129
    for _ in range(20):
        hub.add_chunk(client, Chunk("r", 0, 0, "", [], prompt_logprobs=scores))
    hub.add_chunk(client, Chunk("r", 0, 0, "a", [1]))
    hub.add_chunk(client, Chunk("r", 0, 1, "b", [2]))
    assert [len(chunk.prompt_logprobs or ()) for chunk in client.chunks] == [129] * 20 + [0]
    assert client.chunk_bytes > 20 * 129 * 21 * 100, "and they count for flow control"


def test_log_probabilities_of_a_large_vocabulary_are_sent_in_several_chunks(ends):
    hub, connect = ends
    client = join(hub, connect())
    client.blocked = True
    requests = OpenRequests(hub)
    key = requests.open(client, "r", False).key
    entry = {token: Logprob(-12.5, token + 1, "text", b"text") for token in range(60_000)}
    requests.send_progress([Delta(key, 0, "", [], prompt_logprobs=[entry] * 3)], [])
    completion = CompletionOutput(0, "abc", [0, 1, 2], -37.5, [entry] * 3, "stop", text_offsets=[0, 1, 2])
    requests.send_progress([], [RequestOutput(key, None, [7, 8, 9, 7], [completion], True)])
    assert [len(chunk.prompt_logprobs or ()) for chunk in client.chunks] == [1, 1, 1, 0, 0, 0]
    assert [chunk.token_ids for chunk in client.chunks] == [[], [], [], [0], [1], [2]]
    assert max(len(encode(Chunks([chunk]))) for chunk in client.chunks) < MAX_FRAME_BYTES


def test_a_client_that_is_gone_is_reported_once(ends):
    hub, connect = ends
    dealer = connect()
    client = join(hub, dealer)
    dealer.close(0)
    end = time.monotonic() + GUARD
    while not client.closed:
        assert time.monotonic() < end
        hub.add_chunk(client, Chunk("r", 0, 0, "x", [1]))
        hub.flush()
        time.sleep(0.01)
    assert hub.take_lost() == [client] and hub.take_lost() == [] and not hub.clients


def test_a_silent_client_is_removed(ends, monkeypatch):
    hub, connect = ends
    client = join(hub, connect())
    hub.send_heartbeats()
    assert hub.clients
    monkeypatch.setattr(connections, "SILENCE_SECONDS", -1.0)
    hub.send_heartbeats()
    assert hub.take_lost() == [client] and not hub.clients


def test_a_frame_that_cannot_be_sent_costs_one_client_only(ends):
    hub, connect = ends
    dealer = connect()
    client = join(hub, dealer)
    other = connect()
    reader = join(hub, other)
    hub.add_chunk(client, Chunk("r", 0, 0, "x" * (5 << 20), []))
    hub.add_chunk(reader, Chunk("r", 0, 0, "y", []))
    hub.flush()
    assert client.closed and hub.take_lost() == [client]
    assert read(other, 1, hub)[0].chunks[0].text == "y"


def test_long_texts_are_cut_into_chunks_that_fit(ends):
    hub, connect = ends
    dealer = connect()
    client = join(hub, dealer)
    requests = OpenRequests(hub)
    request = requests.open(client, "r", False)
    text = "\U0001f600" * 700_000
    completion = CompletionOutput(0, text, list(range(600)), finish_reason="length")
    requests.send_progress([], [RequestOutput(request.key, None, [1], [completion], True)])
    chunks, end = [], time.monotonic() + GUARD
    while not (chunks and chunks[-1].usage is not None):
        assert time.monotonic() < end
        hub.flush()
        while dealer.poll(10):
            frame = dealer.recv()
            assert len(frame) <= 4 << 20
            chunks += decode_from_server(frame).message.chunks
    assert "".join(chunk.text for chunk in chunks) == text and [
        token for chunk in chunks for token in chunk.token_ids
    ] == list(range(600))
    assert chunks[-1].finish_reason == "length" and all(chunk.usage is None for chunk in chunks[:-1])


def test_ungreeted_clients_are_replaced_and_a_new_one_gets_an_error_when_all_are_greeted(ends, monkeypatch):
    hub, connect = ends
    monkeypatch.setattr(connections, "MAX_CLIENTS", 3)
    strangers = [join(hub, connect()) for _ in range(3)]
    newcomers = []
    for gone in strangers:
        newcomers.append(join(hub, connect()))
        assert newcomers[-1] is not None
        newcomers[-1].greeted = True
        assert gone.closed
    late = connect()
    assert join(hub, late) is None
    assert [error.code for error in read(late, 1, hub)] == ["overloaded"]
    assert not any(client.closed for client in newcomers)


def test_clients_are_not_silent_after_a_pause_of_this_process(ends, monkeypatch):
    hub, connect = ends
    monkeypatch.setattr(connections, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(connections, "PAUSE_SECONDS", 0.2)
    client = join(hub, connect())
    hub.send_heartbeats()
    time.sleep(0.5)
    hub.send_heartbeats()
    assert not client.closed
    while not client.closed:
        time.sleep(0.05)
        hub.send_heartbeats()
    assert hub.take_lost() == [client]
