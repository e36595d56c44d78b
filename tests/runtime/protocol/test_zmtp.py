"""A peer's bytes become messages, however they are cut; violations of ZMTP raise."""

import random

import pytest
from sidestream.runtime.protocol.messages import MAX_FRAME_BYTES
from sidestream.runtime.protocol.zmtp import MAX_PARTS, MULTIPART, READY, Reader, ZmtpError, command, frame_header
from support.raw_peer import GREETING, MORE, PING, frame, ready


def read(reader, data):
    reader.feed(data)
    messages = []
    while (message := reader.next_message()) is not None:
        messages.append(message)
    return messages


def opened():
    reader = Reader()
    assert read(reader, GREETING + ready()) == []
    assert reader.ready
    assert reader.replies == READY
    reader.replies.clear()
    return reader


@pytest.mark.parametrize("step", [1, 7, 100, 10**6])
def test_messages_of_all_lengths_however_they_are_cut(step):
    source = random.Random(step)
    messages = [source.randbytes(size) for size in (1, 255, 256, 70_000, 3)]
    data = GREETING + ready(b"name") + b"".join(map(frame, messages))
    reader, found = Reader(), []
    for start in range(0, len(data), step):
        found += read(reader, data[start : start + step])
    assert found == messages
    assert len(reader) == 0, "nothing is kept"


def test_what_is_sent_is_what_is_read():
    for size in (0, 1, 255, 256, 1 << 20):
        assert frame_header(size) + bytes(size) == frame(bytes(size))


def test_a_ping_is_answered():
    reader = opened()
    assert read(reader, PING) == []
    assert reader.replies == command(b"PONG", b"x")


def test_a_message_of_several_frames_is_reported_and_not_kept():
    reader = opened()
    for _ in range(10):
        assert read(reader, frame(bytes(1 << 16), MORE)) == []
        assert len(reader) == 0
    assert read(reader, frame(b"last")) == [MULTIPART]
    assert read(reader, frame(b"next")) == [b"next"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xff" + bytes(8) + b"\x00",
        GREETING.replace(b"NULL", b"CURV"),
        GREETING.replace(b"\x7f\x03", b"\x7f\x02"),
        GREETING + frame(b"early"),
        GREETING + frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB", 4),
        GREETING + frame(b"\x05READY\x0bSocket-Type\xff\xff\xff\xffSUB", 4),
        GREETING + frame(b"", 4),
        GREETING + ready() + b"\x08\x00",
        GREETING + ready() + b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
        GREETING + ready() + b"\x06" + (1 << 20).to_bytes(8, "big"),
        GREETING + ready() + frame(b"", MORE) * (MAX_PARTS + 1),
        GREETING + ready() + frame(b"\x05ERROR\x03why", 4),
    ],
)
def test_violations_of_zmtp_are_refused(data):
    with pytest.raises(ZmtpError):
        read(Reader(), data)


def test_random_bytes_are_refused_or_wait():
    source = random.Random(0)
    for _ in range(3000):
        reader = opened() if source.random() < 0.7 else Reader()
        try:
            read(reader, source.randbytes(source.choice((1, 10, 100, 1000))))
        except ZmtpError:
            continue
        assert len(reader) <= 1000
