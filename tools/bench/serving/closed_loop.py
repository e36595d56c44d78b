"""One process of clients for `sidestream bench http`: a constant number of streams, over ZeroMQ or over HTTP.

`python -m sidestream.tools.bench.serving.closed_loop` prints a line when it is ready. It reads a `Load` as JSON from
each line of its input, runs it, and prints a line of `ClientFigures`.
"""

import asyncio
import contextlib
import random
import resource
import sys
import time
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

import msgspec

from ....runtime.api.sampling_params import SamplingParams
from ....runtime.client.async_client import AsyncClient
from .traffic import random_ids

EVENT, DONE, LAST_CHUNK = b"data: ", b"data: [DONE]", b"0\r\n\r\n"
KEPT = 1024
MAX_PAUSE_SECONDS = 0.02
"""Longest random pause of a stream before its next request, a few steps. Without it every request would be sent at the
end of a step, and its first token would depend on whether it is in time for the next plan.
"""


class Load(msgspec.Struct, kw_only=True):
    """The load of one process.

    url             an engine's address, or http://host:port
    streams, place  number of streams, and the index of the first one among `all_streams` of all processes
    model           the base model's name for HTTP
    adapters        names that take turns; none: the base model
    begin, end      seconds of time.monotonic(); figures are those between them
    """

    url: str
    streams: int
    place: int
    all_streams: int
    prompt_len: int
    output_len: int
    vocabulary: int
    model: str
    adapters: list[str]
    seed: int
    begin: float
    end: float


class ClientFigures(msgspec.Struct):
    """The figures of one process between `begin` and `end`.

    tokens          received; a chunk or an event counts as its share of the answer's tokens
    first_tokens    seconds from a request to its first token
    gaps            seconds between consecutive chunks of a stream
    cpu_seconds     of this process
    problems        errors, at most one per stream
    """

    tokens: float
    requests: int
    first_tokens: list[float]
    gaps: list[float]
    cpu_seconds: float
    problems: list[str]


_decode_load = msgspec.json.Decoder(Load).decode
decode_figures = msgspec.json.Decoder(ClientFigures).decode


@dataclass
class Answer:
    """Times of one request and of its chunks, in seconds of time.monotonic()."""

    sent: float
    times: "array[float]" = field(default_factory=lambda: array("d"))


class Failed(Exception):
    """A request failed or got a short answer."""


async def over_zeromq(load: Load, client: AsyncClient, prompt: list[int], adapter: str | None, tokens: int) -> Answer:
    """Send one request over ZeroMQ. Raises Failed for a short answer."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answer, arrived = Answer(time.monotonic()), 0
    async with contextlib.aclosing(client.stream(prompt, params, adapter)) as chunks:
        async for chunk in chunks:
            if chunk.token_ids:
                answer.times.append(time.monotonic())
                arrived += len(chunk.token_ids)
    if arrived != tokens:
        raise Failed(f"{arrived} tokens arrived, not {tokens}")
    return answer


class Http:
    """An HTTP connection that stays open, and parses answers only to count their events."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self.writer, self._host = reader, writer, host

    @classmethod
    async def connect(cls, url: str) -> "Http":
        """Connect."""
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port), parts.netloc)

    async def ask(self, load: Load, prompt: list[int], adapter: str | None, tokens: int) -> Answer:
        """Send one request. Raises Failed for an answer that is refused or short."""
        fields = {"model": adapter or load.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body = msgspec.json.encode(fields | {"ignore_eos": True, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        answer = Answer(time.monotonic())
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.partition(b"\r\n")[0]:
            raise Failed(status.partition(b"\r\n")[0].decode(errors="replace"))
        kept = b""
        while True:
            data = await self._reader.read(1 << 16)
            if not data:
                raise Failed("the connection was cut")
            now = time.monotonic()
            fresh = kept[1 - len(EVENT) :] + data
            answer.times.extend([now] * fresh.count(EVENT))
            kept = (kept + data)[-KEPT:]
            if DONE in kept and kept.endswith(LAST_CHUNK):
                break
        if b'"finish_reason":"length"' not in kept:
            raise Failed(f"the answer ended with {kept[-200:]!r}")
        answer.times.pop()  # [DONE] is no token
        return answer


async def stream(load: Load, number: int, client: AsyncClient | None, answers: list[tuple[Answer, int]]) -> None:
    """Send requests in a row until `end`; first answers differ in length, so that streams end at different times."""
    source = random.Random(f"{load.seed} {number}")
    tokens = max(1, load.output_len * (number + 1) // load.all_streams)
    connection = None if client is not None else await Http.connect(load.url)
    turn = number
    try:
        while time.monotonic() < load.end:
            prompt = random_ids(source, load.prompt_len, load.vocabulary)
            adapter = load.adapters[turn % len(load.adapters)] if load.adapters else None
            if connection is not None:
                answer = await connection.ask(load, prompt, adapter, tokens)
            else:
                assert client is not None  # one of the two was created
                answer = await over_zeromq(load, client, prompt, adapter, tokens)
            answers.append((answer, tokens))
            tokens, turn = load.output_len, turn + 1
            await asyncio.sleep(source.uniform(0.0, MAX_PAUSE_SECONDS))
    finally:
        if connection is not None:
            connection.writer.close()


async def run(load: Load) -> ClientFigures:
    """Run a load."""
    answers: list[tuple[Answer, int]] = []

    async def cpu() -> float:
        moments = []
        for moment in (load.begin, load.end):
            await asyncio.sleep(max(0.0, moment - time.monotonic()))
            used = resource.getrusage(resource.RUSAGE_SELF)
            moments.append(used.ru_utime + used.ru_stime)
        return moments[1] - moments[0]

    async with contextlib.AsyncExitStack() as stack:
        http = load.url.startswith("http://")
        client = None if http else await stack.enter_async_context(AsyncClient(load.url, name="bench http"))
        numbers = range(load.place, load.place + load.streams)
        cpu_seconds, *ends = await asyncio.gather(
            cpu(), *(stream(load, number, client, answers) for number in numbers), return_exceptions=True
        )
    problems = [f"{type(end).__name__}: {end}" for end in (cpu_seconds, *ends) if isinstance(end, BaseException)]
    return summarize(answers, load, cpu_seconds if isinstance(cpu_seconds, float) else 0.0, problems)


def summarize(answers: list[tuple[Answer, int]], load: Load, cpu_seconds: float, problems: list[str]) -> ClientFigures:
    """Return the figures of all answers."""

    def counts(moment: float) -> bool:
        return load.begin <= moment < load.end

    asked = [answer for answer, _ in answers if counts(answer.sent)]
    return ClientFigures(
        tokens=sum(tokens * sum(map(counts, answer.times)) / len(answer.times) for answer, tokens in answers),
        requests=len(asked),
        first_tokens=[answer.times[0] - answer.sent for answer in asked],
        gaps=[later - earlier for answer, _ in answers for earlier, later in pairwise(answer.times) if counts(earlier)],
        cpu_seconds=cpu_seconds,
        problems=problems,
    )


def main() -> None:
    """Run loads until standard input ends."""
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        done = asyncio.run(run(_decode_load(line)))
        print(msgspec.json.encode(done).decode(), flush=True)


if __name__ == "__main__":
    main()
