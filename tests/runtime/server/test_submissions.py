"""Limits on waiting requests: no client uses the places of the others."""

from collections import Counter

from sidestream.runtime.protocol.messages import Accepted, Error, Sampling, Submit
from sidestream.runtime.server.connections import ClientConnection, Connections
from sidestream.runtime.server.gpu_link import Ready
from sidestream.runtime.server.open_requests import OpenRequests
from sidestream.runtime.server.server_state import ServerState
from sidestream.runtime.server.stepper import Stepper
from sidestream.runtime.server.submissions import GrammarQueue, Submissions


class Link:
    """A GPU process that never answers."""

    def send(self, notice):
        """Ignore it."""

    def submit(self, plan):
        """Ignore it."""


class Sent(list):
    """Messages to clients."""

    def send(self, client, message):
        self.append((client.number, message))

    send_error = Connections.send_error

    def add_chunk(self, client, chunk):
        self.append((client.number, chunk))


class Server:
    """Submissions before a scheduler that admits nothing."""

    def __init__(self, max_waiting):
        ready = Ready(100, 64, 64, 1024, 4, 256, 0, [0], [])
        self.sent = Sent()
        self.requests = OpenRequests(self.sent)
        state, grammars = ServerState(stepper=Stepper(ready, Link(), None)), GrammarQueue(None)
        self.submissions = Submissions(state, self.sent, self.requests, None, None, grammars, max_waiting)
        self.clients: dict[int, ClientConnection] = {}
        self.asked = 0

    def submit(self, number, n=1, owner=""):
        """Submit one prompt of a client; return the answer."""
        client = self.clients.setdefault(number, ClientConnection(b"%d" % number, number, 0.0, 0.0))
        self.asked += 1
        sampling = Sampling(n=n, temperature=1.0)
        self.submissions.submit(
            client, Submit(f"r{self.asked}", prompt_token_ids=[1, 2], sampling=sampling, owner=owner)
        )
        return self.sent[-1][1]

    def fill(self, number, **more):
        """Submit until one is refused; return the number accepted and the error."""
        taken = 0
        while isinstance(answer := self.submit(number, **more), Accepted):
            taken += more.get("n", 1)
        assert isinstance(answer, Error) and answer.code == "overloaded" and answer.retry_after
        return taken, answer.message


def test_a_client_leaves_places_for_the_next_one():
    server = Server(64)
    taken, answer = server.fill(1)
    assert server.submissions._requests.counts["overloaded_total"] == 1
    assert taken == 32 and "32 are this client's; the 32 free places are for others" in answer
    assert [server.fill(number)[0] for number in (2, 3, 4, 5, 6)] == [16, 8, 4, 2, 1]
    assert server.fill(7) == (1, "too many requests are waiting")


def test_what_ends_makes_room_for_its_client():
    server = Server(8)
    assert server.fill(1)[0] == 4
    for request in server.requests.all()[:2]:
        server.submissions.abort(request)
    assert server.fill(1)[0] == 2
    server.submissions.abort_all(server.clients[1])
    assert server.fill(2)[0] == 4


def test_completions_count():
    server = Server(16)
    assert server.fill(1)[0] == 8
    assert Counter(isinstance(server.submit(1, n=2), Accepted) for _ in range(4)) == {False: 4}
    assert server.fill(12)[0] == 4, "client 1 is not taken for client 12"


def test_those_that_one_connection_asks_for_leave_places_for_each_other():
    server = Server(64)
    assert [server.fill(1, owner=owner)[0] for owner in ("", "a", "ab")] == [32, 16, 8]
    assert server.fill(2, owner="a")[0] == 4, "another connection's"


def test_a_connection_cannot_use_all_places_by_naming_many_owners():
    server = Server(90)
    taken = sum(isinstance(server.submit(1, owner=str(number)), Accepted) for number in range(200))
    assert taken == 80 and "of this connection" in server.sent[-1][1].message
    assert server.fill(2)[0] == 5


def test_a_single_place_can_be_used():
    server = Server(1)
    assert isinstance(server.submit(1), Accepted)
    assert server.submit(2).message == "too many requests are waiting"
