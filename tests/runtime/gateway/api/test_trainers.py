"""What reinforcement learning sends: rollouts by token ids, new adapters in a pause, old ones unloaded."""

import shutil
import threading

import httpx
import pytest
from sidestream.runtime.demo_model import demo_adapters
from support.live_server import serving

PROMPT = [5, 17, 40, 3, 99]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A server, and a directory that it may load adapters from."""
    root = tmp_path_factory.mktemp("policies")
    with serving("--allow-adapter-loading", "--adapter-root", str(root), "--resolve-adapters") as server:
        yield server, root


def post(server, path, body=None, status=200, **options):
    answer = httpx.post(server.url + path, json=body, timeout=600, **options)
    assert answer.status_code == status, answer.text
    return answer.json() if "json" in answer.headers["Content-Type"] else answer.text


def rollout(server, model, **fields):
    """TRL's request of one turn: ids and their log-probabilities."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 40, "temperature": 1.0, "n": 1, "seed": (1 << 63) - 1}
    body |= {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    answer = post(server, "/v1/completions", body | {"return_token_ids": True, "logprobs": 0} | fields)
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]


def test_a_new_policy_is_loaded_in_a_pause(trainer):
    """The order of calls of TRL 1.16's AsyncGRPO, which reads /server_info before it trains; a rollout that is under
    way continues with its own policy.
    """
    server, root = trainer
    names = sorted(demo_adapters())[:2]
    for version, name in enumerate(names):
        shutil.copytree(demo_adapters()[name], root / f"policy-v{version}")
    assert httpx.get(server.url + "/health").status_code == 200
    models = httpx.get(server.url + "/v1/models").json()["data"]
    assert models[0]["max_model_len"] == 256
    assert httpx.get(server.url + "/get_world_size").json() == {"world_size": 1}
    info = httpx.get(server.url + "/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["lora_config"]["max_lora_rank"] >= 8 and info["lora_config"]["max_loras"] >= 1
    assert info["parallel_config"]["data_parallel_size"] == 1
    assert info["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert info["model_config"]["dtype"] == "torch.float32", "AsyncGRPO without LoRA compares it with its own"
    assert info["weight_transfer_config"] is None, "GRPOTrainer says that it cannot replace weights"
    lora = {"lora_name": "policy-v0", "lora_path": str(root / "policy-v0"), "load_inplace": False}
    post(server, "/v1/load_lora_adapter", lora)
    greedy = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    expected = rollout(server, "policy-v0", **greedy)[0]

    found = []
    under_way = threading.Thread(target=lambda: found.append(rollout(server, "policy-v0", **greedy)[0]))
    under_way.start()
    assert post(server, "/pause", params={"mode": "keep"}) == {"status": "paused"}
    assert httpx.get(server.url + "/is_paused").json() == {"is_paused": True}
    post(server, "/v1/load_lora_adapter", lora | {"lora_name": "policy-v1", "lora_path": str(root / "policy-v1")})
    assert post(server, "/resume") == {"status": "resumed"}
    assert httpx.get(server.url + "/is_paused").json() == {"is_paused": False}
    under_way.join()
    assert found == [expected]

    assert rollout(server, "policy-v1", **greedy)[0] != expected
    shutil.rmtree(root / "policy-v0")
    post(server, "/v1/unload_lora_adapter", {"lora_name": "policy-v0"})
    post(server, "/v1/completions", {"model": "policy-v0", "prompt": PROMPT}, status=404)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/generate/", "/v1/completions"),  # the client of `trl vllm-serve`
        ("/chat/", "/v1/chat/completions"),
        ("/get_sequence_logprobs/", "prompt_logprobs=0 and max_tokens=1"),
        ("/init_communicator/", "/v1/load_lora_adapter"),
        ("/update_named_param/", "/v1/load_lora_adapter"),
        ("/close_communicator/", "/v1/load_lora_adapter"),
        ("/reset_prefix_cache/", "no reset is needed"),
        ("/init_weight_transfer_engine", "/v1/load_lora_adapter"),  # AsyncGRPO without LoRA
        ("/start_weight_update", "/v1/load_lora_adapter"),
        ("/update_weights", "/v1/load_lora_adapter"),
        ("/finish_weight_update", "/v1/load_lora_adapter"),
        ("/inference/v1/generate", "/v1/completions"),  # SkyRL's own trainer
        ("/skyrl/v1/load_lora_adapter", "/v1/load_lora_adapter"),
        ("/sleep", "/pause"),
        ("/update_weights_from_tensor", "/v1/load_lora_adapter"),  # SGLang's
    ],
)
def test_paths_of_trainers_that_are_not_served_name_the_alternative(trainer, path, words):
    server, _ = trainer
    error = post(server, path, {}, status=501)["error"]
    assert error["code"] == "unsupported_path" and words in error["message"] and path in error["message"]


def test_slashes_at_the_end_of_a_path_are_redirected(trainer):
    """The client of `trl vllm-serve` waits for /health/; without it, it could not see the errors above."""
    server, _ = trainer
    for path in ("/health/", "/get_world_size/"):
        assert httpx.get(server.url + path, follow_redirects=True).status_code == 200


def test_each_token_of_a_rollout_has_its_log_probability(trainer):
    """Also the one that ends an answer, and those of a stop string, which the text does not have."""
    server, _ = trainer
    reasons = set()
    for seed in range(3):
        for fields in ({}, {"stop": ["e"]}, {"ignore_eos": True}):
            ids, logprobs, reason = rollout(server, None, seed=seed, max_tokens=16, **fields)
            assert len(ids) == len(logprobs) > 0 and all(value <= 0 for value in logprobs)
            reasons.add(reason)
    assert reasons == {"stop", "length"}


def test_a_tinker_server_samples_several_sequences(trainer):
    """SkyRL's request, with `logprobs: true`. Its model is a checkpoint that SkyRL has just put below the root."""
    server, root = trainer
    body = {"prompt": PROMPT, "n": 3, "seed": 7, "max_tokens": 12, "temperature": 0.8, "top_p": 0.95, "top_k": -1}
    body |= {"logprobs": True, "stream": False, "return_token_ids": True, "model": "run1_0001"}
    assert "run1_0001" in post(server, "/v1/completions", body, status=404)["error"]["message"]
    (root / "unpacked").mkdir()
    shutil.copytree(demo_adapters()["shout"], root / "unpacked" / "checkpoint")
    (root / "unpacked" / "checkpoint").rename(root / "run1_0001")
    answer = post(server, "/v1/completions", body, headers={"X-Session-ID": "s1", "Authorization": "Bearer tml-dummy"})
    assert len(answer["choices"]) == 3
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == PROMPT
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) <= 12
    scored = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    choice = post(server, "/v1/completions", scored)["choices"][0]
    assert [list(entry) for entry in choice["prompt_logprobs"][1:]] == [[str(token)] for token in PROMPT[1:]]
