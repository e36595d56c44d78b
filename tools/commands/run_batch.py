"""`sidestream run-batch`: a file of requests in OpenAI's batch format, answered by a running server."""

import argparse
import errno
import http.client
import os
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..options.engine import add_command, add_value, writing

DESCRIPTION = """\
Answer every request of a file, in OpenAI's batch format, through the HTTP of `sidestream serve` or `sidestream
gateway`. Each line is a request: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}.

Answers are appended in the order in which they arrive. After an interruption run the same command again: it skips the
requests that are answered in the file."""

EXAMPLES = """\
examples:
  sidestream run-batch -i requests.jsonl -o answers.jsonl
  sidestream run-batch -i requests.jsonl -o answers.jsonl --url https://llm.example.org --concurrency 256"""

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
LATER = (408, 429, 500, 502, 503, 504)
MAX_PAUSE_SECONDS = 60.0
REQUEST_SECONDS = 3600.0


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    usage = "%(prog)s -i FILE -o FILE [options]"
    parser = add_command(
        commands, "run-batch", "answer a file of requests through a running server", DESCRIPTION, EXAMPLES, run, usage
    )
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE", help="the requests, one a line")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file of the answers")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: $SIDESTREAM_API_KEY)")
    add_value(parser, "--concurrency", 64, "requests at once")
    add_value(parser, "--retries", 10, "how often to send a refused or lost request again", int)


def read_requests(path: Path) -> dict[str, tuple[str, bytes]]:
    """Return custom_id -> (path, body) of every line. Raises ValueError for a line that is not a request."""
    import msgspec

    class Line(msgspec.Struct):
        custom_id: str
        url: str
        body: dict[str, Any]
        method: str = "POST"

    decoder = msgspec.json.Decoder(Line)
    requests: dict[str, tuple[str, bytes]] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} line {number} is not a request of a batch: {error}") from None
            if line.method != "POST" or line.url not in PATHS:
                raise ValueError(
                    f"{path} line {number}: {line.method} {line.url} is not one of POST {', '.join(PATHS)}"
                )
            if line.custom_id in requests:
                raise ValueError(
                    f"{path} line {number}: custom_id {line.custom_id!r} is used twice; give each request its own"
                )
            if line.body.get("stream"):
                raise ValueError(f"{path} line {number}: stream is not supported in a batch; leave it out")
            requests[line.custom_id] = line.url, msgspec.json.encode(line.body)
    return requests


def read_answered(path: Path) -> set[str]:
    """Return the ids of the answered requests of a file. Removes an incomplete last line from it."""
    import msgspec

    if not path.exists():
        return set()
    done, whole = set(), 0
    with path.open("rb+") as file:
        for text in file:
            if not text.endswith(b"\n"):
                break
            whole += len(text)
            try:
                done.add(str(msgspec.json.decode(text)["custom_id"]))
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path} has a line that is not an answer of a batch; name another file") from None
        file.truncate(whole)
    return done


class Server:
    """An HTTP client for many threads; each call opens a connection."""

    def __init__(self, url: str, key: str, retries: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url} must begin with http:// or https:// and name a host")
        self.url, self._parts, self._key, self._retries = url, parts, key, retries

    def ask(self, path: str, body: bytes) -> tuple[int, str, Any]:
        """Return (status, request id, body). Raises OSError if all retries fail."""
        for left in range(self._retries, -1, -1):
            pause = 1.0
            try:
                status, headers, data = self._once(path, body)
            except (OSError, http.client.HTTPException) as error:
                if not left:
                    raise OSError(f"{self.url} does not answer: {error}") from None
            else:
                if status not in LATER or not left:
                    return status, headers.get("x-request-id") or "", _decoded(data)
                pause = _seconds(headers.get("retry-after"))
            time.sleep(pause)
        raise OSError("no retries were allowed")

    def _once(self, path: str, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=REQUEST_SECONDS)
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request("POST", self._parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


def _seconds(header: str | None) -> float:
    try:
        return min(MAX_PAUSE_SECONDS, max(0.1, float(header or 1)))
    except ValueError:
        return 1.0


def _decoded(data: bytes) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(data)
    except ValueError:
        return {"error": {"message": "the answer is not JSON", "type": "server_error", "param": None, "code": None}}


def answers(
    server: Server, requests: dict[str, tuple[str, bytes]], concurrency: int
) -> Iterator[tuple[str, tuple[int, str, Any]]]:
    """Yield (custom_id, answer) as they arrive. Raises OSError when the server is lost; open requests are dropped."""
    with ThreadPoolExecutor(concurrency) as pool:
        waiting = iter(requests.items())
        open_: dict[Future[tuple[int, str, Any]], str] = {}
        try:
            while True:
                while len(open_) < concurrency and (entry := next(waiting, None)) is not None:
                    open_[pool.submit(server.ask, *entry[1])] = entry[0]
                if not open_:
                    return
                for done in wait(open_, return_when=FIRST_COMPLETED).done:
                    yield open_.pop(done), done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run(options: argparse.Namespace) -> int:
    """Answer the remaining requests; return 0 when all are answered, 1 when the server was lost."""
    import msgspec
    from tqdm import tqdm

    requests = read_requests(options.input)
    done = read_answered(options.output) & requests.keys()
    key = options.api_key if options.api_key is not None else os.environ.get("SIDESTREAM_API_KEY", "")
    server = Server(options.url, key, options.retries)
    left = {name: request for name, request in requests.items() if name not in done}
    failed = 0
    with (
        writing(options.output),
        options.output.open("ab") as file,
        tqdm(total=len(requests), initial=len(done), unit="req") as bar,
    ):
        try:
            for custom_id, (status, request_id, body) in answers(server, left, options.concurrency):
                line = {
                    "id": f"batch_req_{uuid.uuid4().hex}",
                    "custom_id": custom_id,
                    "response": {"status_code": status, "request_id": request_id, "body": body},
                    "error": None,
                }
                file.write(msgspec.json.encode(line) + b"\n")
                file.flush()
                failed += status != 200
                bar.update()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            print(f"{error}; run the same command again to continue", file=sys.stderr)
            return 1
    print(f"{len(requests)} requests: {len(done)} answered before, {len(left)} now, {failed} of these with an error")
    return 0
