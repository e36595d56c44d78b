"""Requests with `prefill_only` and `kv_pages` in the batcher, over engines whose model is a hash."""

import pytest
from sidestream.runtime.protocol.messages import Chunk, Error, KvPages, Sampling, Submit
from sidestream.runtime.scheduler.transfer import leased_pages
from sidestream.runtime.server.connections import ClientConnection, Connections
from sidestream.runtime.server.gpu_link import CopyPages, PagesCopied, Ready, Timing
from sidestream.runtime.server.open_requests import OpenRequests
from sidestream.runtime.server.server_state import ServerState
from sidestream.runtime.server.stepper import Stepper
from sidestream.runtime.server.submissions import GrammarQueue, Submissions
from sidestream.runtime.server.transfer.prefill_requests import PrefillRequests
from sidestream.tools.cli import main
from support.engines import Clock, prompt
from support.fake_runner import FakeRunner, continuation


class Sent(list):
    """Messages to clients."""

    def send(self, client, message):
        self.append(message)

    send_error = Connections.send_error

    def add_chunk(self, client, chunk):
        self.append(chunk)


class Server:
    """A batcher without sockets, and its GPU process without a process."""

    def __init__(self, role: str, host_pages: int = 0, other: "Server | None" = None) -> None:
        self.runner = FakeRunner(40, lag=9)
        self.runner.other = None if other is None else other.runner
        self.waiting: list = []
        ready = Ready(97, 40, 64, 640, 8, 512, 0, [], [], host_pages=host_pages, kv_role=role)
        self.state, self.sent = ServerState(stepper=Stepper(ready, self, None)), Sent()
        self.requests = OpenRequests(self.sent)
        self.prefills = PrefillRequests(self.state, self.sent, self.requests, "memory")
        self.submissions = Submissions(self.state, self.sent, self.requests, None, None, GrammarQueue(None), 99)
        self.client = ClientConnection(b"1", 1, 0.0, 0.0)

    def send(self, notice) -> None:
        """Copy pages when the batcher sends that."""
        if isinstance(notice, CopyPages):
            self.runner.copy_pages(notice.copies)

    def submit(self, plan) -> None:
        self.waiting.append(self.runner.submit(plan))

    def run(self) -> None:
        """Turns of the loop until nothing happens any more."""
        for _ in range(30):
            self.state.stepper.submit_steps()
            if self.waiting:
                result = self.runner.collect(self.waiting.pop(0))
                self.requests.send_progress(*self.state.stepper.receive_result(result, Timing(1, 1, 1)))
            for done in self.runner.copied():
                self.state.stepper.pages_copied(PagesCopied(*done))
            self.prefills.answer()

    def ask(self, name: str, ids: list[int], **fields) -> list:
        """Submit a request; return the messages until nothing happens any more."""
        self.sent.clear()
        sampling = Sampling(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)
        self.submissions.submit(self.client, Submit(name, prompt_token_ids=ids, sampling=sampling, **fields))
        self.run()
        return list(self.sent)

    @property
    def leases(self) -> int:
        return self.state.stepper.stats()["page_leases"]


def tokens(messages: list) -> list[int]:
    return [token for message in messages if isinstance(message, Chunk) for token in message.token_ids]


@pytest.fixture
def prefill() -> Server:
    return Server("prefill", host_pages=40)


def test_the_places_of_one_engine_are_an_answer_of_the_other(prefill: Server) -> None:
    ids = prompt(200)
    accepted, chunk = prefill.ask("p", ids, prefill_only=True)
    assert accepted.request_id == "p" and chunk.kv_pages is not None and len(chunk.kv_pages.places) == 3
    assert chunk == Chunk("p", 0, 0, "", [], kv_pages=chunk.kv_pages) and chunk.kv_pages.source == "memory"
    decode = Server("decode", other=prefill)
    assert tokens(decode.ask("d", ids, kv_pages=chunk.kv_pages)) == continuation(ids, -1, 5, 97)
    assert decode.runner.computed == 200 - 3 * 64 + 4
    assert prefill.leases == 1
    prefill.submissions.abort(prefill.requests.get(prefill.client.open["p"]))
    assert prefill.leases == 0 and not len(prefill.requests)
    assert prefill.requests.counts["finished_total"] == 1 and prefill.requests.counts["aborted_total"] == 0


@pytest.mark.parametrize("places", [[0, 1, 2], [9, 9, 9], [1 << 52], []])
def test_places_of_other_pages_do_not_matter(prefill: Server, places: list[int]) -> None:
    prefill.ask("p", prompt(200, 3), prefill_only=True)
    ids = prompt(200)
    for role in ("decode", ""):
        server = Server(role, other=prefill)
        assert tokens(server.ask("d", ids, kv_pages=KvPages("memory", places))) == continuation(ids, -1, 5, 97)
        assert server.runner.computed == 204


def test_pages_are_released_when_the_client_is_lost(prefill: Server) -> None:
    prefill.ask("p", prompt(200), prefill_only=True)
    prefill.ask("q", prompt(300, 1), prefill_only=True)
    assert prefill.leases == 2
    prefill.submissions.abort_all(prefill.client)
    assert prefill.leases == 0 and not len(prefill.requests)


def test_an_expired_lease_ends_its_request(prefill: Server) -> None:
    pages = prefill.prefills._pages
    assert pages is not None
    pages._clock = clock = Clock()
    prefill.ask("p", prompt(200), prefill_only=True)
    prefill.sent.clear()
    clock.now += leased_pages.LEASE_SECONDS
    prefill.run()
    (chunk,) = prefill.sent
    assert chunk.finish_reason == "abort" and chunk.usage is not None and prefill.leases == 0
    assert prefill.state.stepper.stats()["page_leases_expired_total"] == 1


def test_only_prefill_engines_compute_prompts_alone(prefill: Server) -> None:
    for role in ("", "decode"):
        (refused,) = Server(role).ask("p", prompt(200), prefill_only=True)
        assert isinstance(refused, Error) and refused.code == "invalid_request"
        assert "prefill_only needs a prefill engine" in refused.message
    _, chunk = prefill.ask("short", prompt(64), prefill_only=True)
    assert chunk.kv_pages == KvPages("memory", []), "no page is full"
    (refused,) = prefill.ask("long", prompt(900), prefill_only=True)
    assert isinstance(refused, Error) and "900" in refused.message
    assert tokens(prefill.ask("usual", prompt(70))) == continuation(prompt(70), -1, 5, 97), "it also answers"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--prefill-engines 1", "--prefill-engines needs engines of the other kind; add --decode-engines N"),
        ("--decode-engines 2", "--decode-engines needs engines of the other kind; add --prefill-engines N"),
        ("--data-parallel-size 2", "--data-parallel-size contradicts --prefill-engines and --decode-engines"),
        ("--no-http", "--prefill-engines needs HTTP"),
        ("--no-prefix-caching", "--prefill-engines needs the prefix cache; leave --no-prefix-caching out"),
        ("--kv-host-gb 0", "--prefill-engines needs host memory for KV pages; raise --kv-host-gb"),
        ("--kv-host-gb 1 --kv-disk kv", "leave --kv-disk out"),
        ("--tensor-parallel-size 2", "--prefill-engines needs engines of one GPU each"),
        ("--kv-host-gb 60000", r"--kv-host-gb 60000 for 1 prefill engines needs 60000.00 GiB of host memory, and"),
    ],
)
def test_flags_that_contradict_each_other(flags: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    both = "" if "engines" in flags else "--prefill-engines 1 --decode-engines 1"
    assert main(["serve", "--device", "cpu", "--port", "0", *both.split(), *flags.split()]) == 2
    assert problem in capsys.readouterr().err
