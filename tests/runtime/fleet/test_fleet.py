"""A fleet of demo engines on a local Ray: scaling from zero to two and back, kills, and an upgrade under load."""

import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import httpx
import msgspec
import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.fleet.options import FleetOptions
from support.fleet import Door, engines, free_port, local_ray, until

pytestmark = [pytest.mark.first, pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")]
MODELS = ("pirate", "json", "shout", "demo_model")
PROMPT = "What is the capital of France? Tell me more about"
TOKENS = 64


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet", numbered=True)
    folder.chmod(0o700)
    with local_ray(folder):
        yield folder


@pytest.fixture(scope="module")
def options(ray):
    (ray / "root").mkdir()
    return FleetOptions(
        name=f"fleet-{os.getpid()}",
        port=free_port(),
        adapters_root=f"file://{ray}/root",  # as a URL: each host has to fetch what lies there
        min_replicas=0,
        max_replicas=2,
        target_requests=1.5,
        scale_up_seconds=0.5,
        idle_seconds=4,
        engine={"max-num-seqs": 4, "device": "cpu"},
    )


def test_a_fleet_lives(ray, options):
    from sidestream.runtime.fleet.application import deploy
    from sidestream.runtime.fleet.status import fleet_status, format_status

    deploy(options)
    door = Door(options.port)
    assert door.health()["status"] == "idle"
    assert not door.client.get("/metrics").text.count("sidestream_engine_tokens_total"), "it starts no engine"
    assert fleet_status(options.name).engines == []

    # 0 -> 1: the request waits in place
    assert set(MODELS) <= set(door.models())
    expected = {model: door.ask(model, PROMPT, TOKENS) for model in MODELS}
    assert len(set(expected.values())) == len(MODELS)

    # a folder of the root is an adapter, fetched and loaded by the engine that gets its first request
    shutil.copytree(DEMO_MODEL / "adapters" / "pirate", ray / "root" / "newcomer")
    until(lambda: "newcomer" in door.models(), "the new adapter")
    assert door.ask("newcomer", PROMPT, TOKENS) == expected["pirate"]
    shutil.rmtree(ray / "root" / "newcomer")
    until(lambda: "newcomer" not in door.models(), "its end")

    # 1 -> 2 by load, and a replica is killed with all that belongs to it: every stream goes on
    over = threading.Event()

    def stream(model):
        answers = 0
        while not over.is_set():
            assert Door(options.port).stream(model, PROMPT, TOKENS) == expected[model]
            answers += 1
        return answers

    with ThreadPoolExecutor(len(MODELS)) as pool:
        try:
            streams = [pool.submit(stream, model) for model in MODELS]
            until(lambda: list(door.health()["engines"].values()).count("ok") == 2, "a second engine")
            until(lambda: all(each.requests_open for each in fleet_status(options.name).engines), "streams on both")
            os.kill(engines(f"{options.name}:engine")[0], signal.SIGKILL)

            # a rolling upgrade under the same streams
            before = set(door.health()["engines"])
            deploy(msgspec.structs.replace(options, max_waiting=77))
            until(lambda: not before & set(door.health()["engines"]), "new engines only")
        finally:
            over.set()
    assert all(each.result() > 0 for each in streams), "no stream failed, none was wrong"

    # with little to do an adapter stays where it is; two engines that hold it share its requests
    def routed():
        found = fleet_status(options.name)
        assert found.state == "RUNNING" and f"{options.name}: RUNNING" in format_status(found)
        return {each.name: each.routed.get("adapter_on_gpu", 0) for each in found.engines}

    before, after = {"": 0}, dict[str, int]()
    while before.keys() != after.keys():  # an engine that is stopped meanwhile takes its count along
        before = routed()
        for _ in range(4):
            door.ask("pirate", PROMPT, 2)
        after = routed()
    assert sum(after.values()) - sum(before.values()) >= 3

    assert "sidestream_engine_routed_adapter_on_gpu_total{engine=" in door.client.get("/metrics").text
    assert "<title>Sidestream console</title>" in door.client.get("/").text

    # the process that answers HTTP is killed: its streams are cut, and its successor answers who asks again
    (ingress,) = engines(f"{options.name}:ingress")
    with pytest.raises(httpx.RemoteProtocolError):
        Door(options.port).stream("pirate", PROMPT, 1000, begun=lambda: os.kill(ingress, signal.SIGKILL))
    assert Door(options.port).ask("pirate", PROMPT, TOKENS) == expected["pirate"]

    # ... -> 1 -> 0
    until(lambda: door.health()["status"] == "idle", "an idle fleet")
    sockets = ray / "sidestream"
    until(lambda: len(list(sockets.iterdir())) <= 2, "sockets of no engine but the killed one")
