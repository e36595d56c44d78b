"""Who may wait: no client fills the places of the others."""

from collections import Counter

from sidestream.runtime.protocol.messages import Accepted, Error, Sampling, Submit
from sidestream.runtime.server.connections import Client
from sidestream.runtime.server.gpu_link import Ready
from sidestream.runtime.server.grammar_requests import GrammarDesk
from sidestream.runtime.server.open_requests import OpenRequests
from sidestream.runtime.server.state import ServerState
from sidestream.runtime.server.stepper import Stepper
from sidestream.runtime.server.submissions import Submissions


class Link:
    """A GPU process that takes everything and says nothing."""

    def tell(self, notice):
        """Nobody reads it."""

    def submit(self, plan):
        """Nobody computes it."""


class Said(list):
    """What clients were told."""

    def say(self, client, message):
        self.append((client.number, message))

    def add(self, client, chunk):
        self.append((client.number, chunk))


class Desk:
    """Submissions before a scheduler that admits nothing."""

    def __init__(self, max_waiting):
        ready = Ready(100, 64, 64, 1024, 4, 256, 0, [0], [])
        self.said = Said()
        self.requests = OpenRequests(self.said)
        state, grammars = ServerState(stepper=Stepper(ready, Link(), None)), GrammarDesk(None)
        self.submissions = Submissions(state, self.said, self.requests, None, None, grammars, max_waiting)
        self.clients: dict[int, Client] = {}
        self.asked = 0

    def submit(self, number, n=1, owner=""):
        """Asks for one prompt in the name of a client; returns what it was told."""
        client = self.clients.setdefault(number, Client(b"%d" % number, number, 0.0, 0.0))
        self.asked += 1
        sampling = Sampling(n=n, temperature=1.0)
        self.submissions.submit(
            client, Submit(f"r{self.asked}", prompt_token_ids=[1, 2], sampling=sampling, owner=owner)
        )
        return self.said[-1][1]

    def fill(self, number, **more):
        """As many as are taken."""
        taken = 0
        while isinstance(told := self.submit(number, **more), Accepted):
            taken += more.get("n", 1)
        assert isinstance(told, Error) and told.code == "overloaded" and told.retry_after
        return taken, told.message


def test_a_client_leaves_places_for_the_next_one():
    desk = Desk(64)
    taken, told = desk.fill(1)
    assert taken == 32 and "32 of them are this client's, what is left (32) is for others" in told
    assert [desk.fill(number)[0] for number in (2, 3, 4, 5, 6)] == [16, 8, 4, 2, 1]
    assert desk.fill(7) == (1, "too many requests are waiting")


def test_what_ends_makes_room_for_its_client():
    desk = Desk(8)
    assert desk.fill(1)[0] == 4
    for request in desk.requests.all()[:2]:
        desk.submissions.abort(request)
    assert desk.fill(1)[0] == 2
    desk.submissions.lose(desk.clients[1])
    assert desk.fill(2)[0] == 4


def test_completions_count():
    desk = Desk(16)
    assert desk.fill(1)[0] == 8
    assert Counter(isinstance(desk.submit(1, n=2), Accepted) for _ in range(4)) == {False: 4}
    assert desk.fill(12)[0] == 4, "client 1 is not taken for client 12"


def test_those_that_one_connection_asks_for_leave_places_for_each_other():
    desk = Desk(64)
    assert [desk.fill(1, owner=owner)[0] for owner in ("", "a", "ab")] == [32, 16, 8]
    assert desk.fill(2, owner="a")[0] == 4, "another connection's"


def test_a_connection_cannot_name_so_many_that_nothing_is_left():
    desk = Desk(90)
    taken = sum(isinstance(desk.submit(1, owner=str(number)), Accepted) for number in range(200))
    assert taken == 80 and "through this connection" in desk.said[-1][1].message
    assert desk.fill(2)[0] == 5


def test_one_place_can_be_had():
    desk = Desk(1)
    assert isinstance(desk.submit(1), Accepted)
    assert desk.submit(2).message == "too many requests are waiting"
