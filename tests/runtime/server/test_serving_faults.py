"""What happens to everybody else when something dies, stalls or sends rubbish."""

import os
import random
import select
import signal
import socket
import time
from pathlib import Path

import pytest
import zmq
from sidestream.runtime.protocol.framing import encode, header
from sidestream.runtime.protocol.messages import HEADER_BYTES, NO_INSTANCE, Abort, Sampling, Submit
from sidestream.runtime.server.supervisor import MAX_DEATHS
from support.fake_runner import continuation
from support.serving import GUARD, Wire, serve_fake

VOCABULARY = 251
LONG = Sampling(temperature=0.0, ignore_eos=True, max_tokens=400)
SHORT = Sampling(temperature=0.0, ignore_eos=True, max_tokens=6)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve_fake(
        tmp_path_factory.mktemp("faults"), adapters=3, step_seconds=0.001, poison=250, num_pages=24, max_num_seqs=8
    ) as server:
        yield server


def assert_works(wire: Wire) -> None:
    name = f"check{time.monotonic_ns()}"
    wire.submit(name, SHORT, prompt_token_ids=[7, 8])
    assert wire.answer(name).token_ids[0] == continuation([7, 8], -1, 6, VOCABULARY)


def assert_empty(server) -> None:
    stats = server.wait_for(lambda stats: stats["requests_open"] == 0 and stats["pages_in_use"] == 0)
    assert stats["requests_running"] == stats["requests_waiting"] == 0


def test_a_killed_clients_pages_are_free_within_two_steps(server):
    reader, writer = os.pipe()
    with server.connect() as wire:
        with server.held():
            child = os.fork()
            if child == 0:  # a client of its own process, killed in mid-stream
                try:
                    client = Wire(server.address, zmq.Context()).hello()
                    for index in range(4):
                        client.submit(f"r{index}", LONG, prompt_token_ids=[1] * 65)
                    client.until(lambda: all(answer.accepted is not None for answer in client.answers.values()))
                    with server.held(beyond=80):
                        client.until(lambda: all(answer.num_tokens > 2 for answer in client.answers.values()))
                        os.write(writer, b"x")
                        while True:
                            client.receive(1.0)
                finally:
                    os._exit(1)
            os.close(writer)
            assert os.read(reader, 1), "the client has failed"
            wire.submit("other", LONG, prompt_token_ids=[5])
            wire.until(lambda: wire.answers["other"].accepted is not None)
            aborted = server.stats()["aborted_total"]
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            server.wait_for(lambda stats: stats["requests_open"] == 1 and stats["aborted_total"] == aborted + 4)
        assert wire.answer("other").token_ids[0] == continuation([5], -1, 400, VOCABULARY)
    assert_empty(server)


def test_the_pages_of_a_lost_connection_are_free_for_the_next_plan(server):
    wire = server.connect().hello()
    with server.connect() as watcher:
        with server.held(beyond=120):
            wire.submit("r", LONG, prompt_token_ids=[1] * 100)
            wire.until(lambda: wire.answers["r"].num_tokens > 2)
            steps = server.stats()["steps_total"]
            wire.socket.close(0)
            server.wait_for(lambda stats: stats["requests_open"] == 0)
        assert_empty(server)
        assert server.stats()["steps_total"] - steps < 390, "it did not run on to its end"
        assert_works(watcher)


def test_a_poison_request_ends_alone(server):
    with server.connect() as wire:
        with server.held(beyond=20):
            for index in range(6):
                wire.submit(f"good{index}", LONG, prompt_token_ids=[index])
            wire.until(lambda: any(wire.answers[f"good{index}"].num_tokens > 2 for index in range(6)))
            wire.submit("poison", SHORT, prompt_token_ids=[1, 250, 250, 250, 1])
            wire.until(lambda: wire.answers["poison"].accepted is not None)
        error = wire.answer("poison").error
        assert error.code == "request_failed" and "Traceback" not in error.message and "poisoned" not in error.message
        for index in range(6):
            assert not wire.answers[f"good{index}"].over, "it arrived while they ran"
        for index in range(6):
            assert wire.answer(f"good{index}").token_ids[0] == continuation([index], -1, 400, VOCABULARY), (
                "computed again, nothing lost"
            )
        assert server.stats()["failed_steps_total"] > 0
        assert_works(wire)
    assert_empty(server)


def test_kv_exhausted_by_long_prompts_preempts_and_changes_no_token(server):
    prompts = {f"p{index}": [index + 1] * (300 + 10 * index) for index in range(8)}  # 8 * 8 pages, and there are 24
    with server.connect() as wire:
        before = server.stats()["preemptions_total"]
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=130)
        with server.held():
            for name, prompt in prompts.items():
                wire.submit(name, sampling, prompt_token_ids=prompt)
            wire.until(lambda: all(answer.accepted is not None for answer in wire.answers.values()))
        for name in prompts:
            wire.answer(name)
        for name, prompt in prompts.items():
            assert wire.answer(name).token_ids[0] == continuation(prompt, -1, 130, VOCABULARY)
        assert server.stats()["preemptions_total"] > before
    assert_empty(server)


def test_a_slow_reader_stalls_nobody(server):
    slow = server.connect(hwm=1).hello()
    for index in range(7):
        slow.submit(f"s{index}", LONG, prompt_token_ids=[index])
    with server.connect() as wire:
        wire.submit("fast", LONG, prompt_token_ids=[3])
        assert wire.answer("fast").token_ids[0] == continuation([3], -1, 400, VOCABULARY), (
            "while the slow one is not read"
        )
    for index in range(7):  # what waited is all there
        assert slow.answer(f"s{index}").token_ids[0] == continuation([index], -1, 400, VOCABULARY)
    slow.socket.close(0)
    assert_empty(server)


def test_hostile_frames_hurt_nobody(server):
    """Rubbish in every layer: random bytes, true frames with bytes changed, deep nesting, huge lengths, many parts,
    wrong versions.
    """
    generator = random.Random(0)
    good = [
        encode(Submit("a", prompt="hello", sampling=SHORT)),
        encode(Abort(["a", "b"])),
        encode(Submit("b", prompt_token_ids=list(range(100)))),
    ]
    bad = server.connect()

    def frames():
        for _ in range(1500):
            frame = bytearray(generator.choice(good))
            for _ in range(generator.randint(1, 6)):
                frame[generator.randrange(len(frame))] = generator.randrange(256)
            yield [bytes(frame)]
        for _ in range(500):
            yield [generator.randbytes(generator.randint(0, 60))]
        for _ in range(200):
            yield [header(NO_INSTANCE) + generator.randbytes(generator.randint(0, 60))]
        yield [header(NO_INSTANCE) + b"\x81\xa1x" + b"\x91" * 100_000]
        yield [header(NO_INSTANCE) + b"\x81\xa1x" + b"\xdd\xff\xff\xff\xff"]
        yield [header(NO_INSTANCE) + b"\x81\xa4type\xdb\xff\xff\xff\xff"]
        yield [good[0][: HEADER_BYTES + 3]]
        yield [b"SS\x00\x02" + bytes(16) + good[0][HEADER_BYTES:]]
        yield [good[0], good[1], b""]
        yield [b""] * 50
        yield [b"\x00" * 4_000_000]

    for count, parts in enumerate(frames()):
        bad.socket.send_multipart(parts)
        if count % 50 == 0:
            while bad.socket.poll(0):
                bad.socket.recv()
    with server.connect() as wire:
        assert_works(wire)
        # connections take turns: the last of these may still be queued
        server.wait_for(lambda values: values["bad_frames_total"] > 1000)
    bad.socket.close(0)
    oversized = server.connect()
    oversized.socket.send(b"\x00" * 5_000_000)
    with server.connect() as wire:
        assert_works(wire)
    oversized.socket.close(0)
    assert_empty(server)


def test_thousands_of_requests_with_aborts_leave_nothing(tmp_path, pytestconfig):
    generator, count = random.Random(1), 10_000 if pytestconfig.getoption("--exhaustive") else 3_000
    with (
        serve_fake(
            tmp_path, adapters=5, num_pages=64, max_num_seqs=16, max_num_batched_tokens=256, num_slots=3
        ) as server,
        server.connect() as wire,
    ):
        issued = checked = aborted = 0
        wanted: dict[str, tuple[list[int], int, int]] = {}
        while issued < count or wanted:
            while issued < count and len(wanted) < 200:
                name, adapter = f"q{issued}", generator.randint(-1, 4)
                prompt = [generator.randrange(250) for _ in range(generator.randint(1, 12))]
                tokens = generator.randint(1, 4)
                wire.submit(
                    name,
                    Sampling(temperature=0.0, ignore_eos=True, max_tokens=tokens),
                    prompt_token_ids=prompt,
                    stream=bool(issued % 2),
                    adapter=None if adapter < 0 else f"a{adapter}",
                )
                wanted[name] = prompt, adapter, tokens
                issued += 1
                if generator.random() < 0.2:  # what was just sent cannot have ended; another one may have
                    wire.send(Abort([generator.choice([name, generator.choice(list(wanted))])]))
            wire.receive(1.0)
            while wire.receive():
                pass
            for name in [name for name in wanted if wire.answers[name].over]:
                answer, (prompt, adapter, tokens) = wire.answers.pop(name), wanted.pop(name)
                assert answer.error is None
                if "abort" in answer.reasons.values():
                    aborted += 1
                else:
                    assert answer.token_ids[0] == continuation(prompt, adapter, tokens, VOCABULARY)
                    checked += 1
        assert checked + aborted == count and aborted > count / 100
        stats = server.wait_for(lambda stats: stats["pages_in_use"] == 0 and stats["requests_open"] == 0)
        assert stats["requests_running"] == stats["requests_waiting"] == 0


def test_the_death_of_the_gpu_process_is_told(tmp_path):
    with (
        serve_fake(tmp_path, step_seconds=0.005, restart=False) as server,
        server.connect() as wire,
        server.connect() as other,
    ):
        with server.held(beyond=20):
            wire.submit("a", LONG, prompt_token_ids=[1])
            wire.until(lambda: wire.answers["a"].num_tokens > 2)
            other.submit("b", LONG, prompt_token_ids=[2], stream=False)
            other.until(lambda: other.answers["b"].accepted is not None)
            os.kill(server.child("fake_gpu"), signal.SIGKILL)
        assert wire.answer("a").error.code == "engine_dead"
        assert other.answer("b").error.code == "engine_dead"
        assert server.process.wait(GUARD) == 1
        assert "SIGKILL" in server.log.read_text()
    assert not Path(server.address.removeprefix("ipc://")).exists()


def test_the_engine_comes_back(tmp_path):
    with serve_fake(tmp_path, step_seconds=0.005) as server, server.connect() as wire:
        former = wire.instance
        with server.held(beyond=20):
            wire.submit("a", LONG, prompt_token_ids=[1])
            wire.until(lambda: wire.answers["a"].num_tokens > 2)
            os.kill(server.child("fake_gpu"), signal.SIGKILL)
        error = wire.answer("a").error
        assert error.code == "engine_dead" and error.retry_after > 0
        wire.submit("b", SHORT, prompt_token_ids=[1])
        wire.until(lambda: any(getattr(other, "code", "") == "wrong_instance" for other in wire.others))
        wire.welcome = None
        wire.others.clear()
        assert wire.hello().instance != former
        assert_works(wire)
        os.kill(server.child("server.batcher"), signal.SIGKILL)
        with server.connect() as fresh:
            assert_works(fresh)
        assert server.stop() == 0


@pytest.mark.parametrize("role", ["fake_gpu", "server.batcher"])
def test_deaths_with_answers_between_are_no_reason_to_give_up(tmp_path, role):
    """Each comes as soon as a client has its answer."""
    with serve_fake(tmp_path) as server:
        for _ in range(MAX_DEATHS + 1):
            with server.connect() as wire:
                assert_works(wire)
                server.replace(role)
        assert server.stop() == 0


@pytest.mark.parametrize("first, second", [("server.batcher", "fake_gpu"), ("fake_gpu", "server.batcher")])
def test_two_deaths_that_are_noticed_together_are_repaired_together(tmp_path, first, second):
    """Late messages of a replaced process end nothing."""
    with serve_fake(tmp_path) as server:
        with server.connect() as wire:
            assert_works(wire)
        victims = [os.pidfd_open(server.child(role)) for role in (first, second)]
        server.process.send_signal(signal.SIGSTOP)
        for victim in victims:
            signal.pidfd_send_signal(victim, signal.SIGKILL)
            _await_end(victim)  # so that the first death is noticed first
        server.process.send_signal(signal.SIGCONT)
        with server.connect() as wire:
            assert_works(wire)
        assert server.log.read_text().count("starting both processes again") == 1
        assert server.stop() == 0


def test_deaths_in_a_row_end_the_server(tmp_path):
    with serve_fake(tmp_path) as server:
        with server.connect():
            pass  # it serves
        for _ in range(MAX_DEATHS - 1):
            server.replace("fake_gpu")
        os.kill(server.child("fake_gpu"), signal.SIGKILL)
        assert server.process.wait(GUARD) == 1


def test_the_death_of_the_batcher_ends_everything(tmp_path):
    with serve_fake(tmp_path, restart=False) as server, server.connect():
        gpu, batcher = server.child("fake_gpu"), server.child("server.batcher")
        os.kill(batcher, signal.SIGKILL)
        assert server.process.wait(GUARD) == 1
        assert not Path(f"/proc/{gpu}").exists()


def test_the_death_of_the_supervisor_ends_everything(tmp_path):
    with serve_fake(tmp_path) as server, server.connect():
        children = [os.pidfd_open(server.child(role)) for role in ("fake_gpu", "server.batcher")]
        server.process.kill()
        server.process.wait()
        for child in children:
            _await_end(child)
        address = Path(server.address.removeprefix("ipc://"))
        assert [path.name for path in address.parent.iterdir()] == ["engine.sock.lock"], "no sockets are left"


def test_a_port_that_is_taken_is_told_in_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with serve_fake(tmp_path, bind=address) as server:
            assert server.process.wait(GUARD) == 2
            log = server.log.read_text()
            assert log.endswith(f"error: cannot listen at {address}: Address already in use\n")
            assert "Traceback" not in log


def _await_end(process: int) -> None:
    """Wait for the last thread of a process, given as a descriptor (`os.pidfd_open`), and close that."""
    ended, _, _ = select.select([process], [], [], GUARD)
    assert ended, "it outlives what should have ended it"
    os.close(process)
