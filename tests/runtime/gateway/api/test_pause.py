"""Pauses over HTTP, with vLLM's spelling."""

import asyncio
import dataclasses

import pytest
from sidestream.runtime.gateway.auth.admission import NoAuth
from support.gateway import FakeEngines, gateway


class Two(FakeEngines):
    """Two engines of two GPUs each; the second one is paused."""

    async def stats(self):
        shared = {"tensor_parallel_size": 2}
        return {f"engine-{index}": shared | {"paused": index, "max_lora_rank": 16 << index} for index in range(2)}


def ask(method, path, key="boss", engines=None):
    async def run():
        made = engines or Two()
        async with gateway(made, NoAuth("user", "boss")) as http:
            answer = await http.request(method, path, headers={"Authorization": f"Bearer {key}"})
        return answer.status_code, answer.json(), made.calls

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("query", "mode"), [("", "abort"), ("?mode=keep", "keep"), ("?mode=wait&clear_cache=false", "wait")]
)
def test_a_pause_has_a_mode(query, mode):
    assert ask("POST", f"/pause{query}") == (200, {"status": "paused"}, [("pause", mode)])


def test_an_unknown_mode_is_refused():
    status, answer, calls = ask("POST", "/pause?mode=freeze")
    assert status == 400 and not calls and "abort, wait, keep" in answer["error"]["message"]


def test_a_resume():
    assert ask("POST", "/resume") == (200, {"status": "resumed"}, [("resume",)])


def test_the_state_and_the_size_are_those_of_all_engines():
    assert ask("GET", "/is_paused")[1] == {"is_paused": True}
    assert ask("GET", "/is_paused", engines=FakeEngines())[1] == {"is_paused": False}
    assert ask("GET", "/get_world_size")[1] == {"world_size": 4}
    assert ask("GET", "/get_world_size?include_dp=false")[1] == {"world_size": 2}


def test_the_config_is_that_of_the_engines():
    status, answer, _ = ask("GET", "/server_info?config_format=json")
    config = answer["vllm_config"]
    assert status == 200 and config["lora_config"] is None, "no slots"
    assert config["parallel_config"] == {"tensor_parallel_size": 2, "data_parallel_size": 1}
    model = {"model": "base", "dtype": "torch.bfloat16", "max_model_len": 4096, "logprobs_mode": "raw_logprobs"}
    assert config["model_config"] == model and config["weight_transfer_config"] is None
    engines = Two()
    engines.info = dataclasses.replace(engines.info, max_adapters=6)
    config = ask("GET", "/server_info", engines=engines)[1]["vllm_config"]
    assert config["lora_config"] == {"max_lora_rank": 16, "max_loras": 6}, "what all engines can load"


@pytest.mark.parametrize("path", ["/server_info", "/get_world_size"])
def test_without_an_engine_there_is_nothing_to_report(monkeypatch, path):
    async def no_stats(self):
        return {}

    monkeypatch.setattr(Two, "stats", no_stats)
    status, answer, _ = ask("GET", path)
    assert status == 503 and answer["error"]["code"] == "engine_dead"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("GET", "/is_paused"),
        ("GET", "/get_world_size"),
        ("GET", "/server_info?config_format=json"),
    ],
)
def test_a_users_key_may_do_none_of_it(method, path):
    status, answer, calls = ask(method, path, key="user")
    assert status == 403 and answer["error"]["code"] == "admin_only" and not calls
