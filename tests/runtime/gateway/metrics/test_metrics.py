"""/metrics: counters, engine metrics, vLLM's names, and a bounded number of series."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sidestream.runtime.api.errors import EngineDeadError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.interfaces import (
    AdapterCard,
    AdmittedRequest,
    Caller,
    GatewayHealth,
    HttpExchange,
    ModelInfo,
    UsageRecord,
)
from sidestream.runtime.gateway.metrics import metrics as numbers
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.protocol.messages import Chunk

EXCHANGE = AdmittedRequest(
    "r1", "/v1/completions", Caller("search", "search-1"), "10.0.0.1", "sql", "sql", True, ["hi"], SamplingParams()
)
RECORD = UsageRecord(
    1e9, "r1", "/v1/completions", "search", "search-1", "llama", "sql", "aa", 10, 5, 4, 0.25, 1.25, 200,
    engine_queue_seconds=0.125, engine_first_token_seconds=0.375, engine_total_seconds=0.875, longest_output_tokens=5,
    preemptions=3,
)  # fmt: skip
ANSWER = HttpExchange(1e9, "r1", "POST", "/v1/completions", "/v1/completions", 200, 1.3, 99, "10.0.0.1", "search")


class Engines:
    """Two engines that say what a test says; `dead`: nobody answers."""

    def __init__(self, stats: Mapping[str, Mapping[str, float]] | None = None, dead: bool = False) -> None:
        self.told, self.dead = stats or {}, dead

    async def health(self) -> GatewayHealth:
        return GatewayHealth("ok", engines={"engine-0": "ok", "engine-1": "dead"})

    async def model(self) -> ModelInfo:
        if self.dead:
            raise EngineDeadError("nobody answers", "engine_dead")
        return ModelInfo("llama", 256, 4096, True, max_adapters=8)

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        return self.told

    async def adapters(self) -> list[AdapterCard]:
        return [
            AdapterCard("sql", 8, "aa", {"engine-0": "gpu", "engine-1": "disk"}, running=2),
            AdapterCard("chat", 8, "bb", {"engine-0": "gpu"}, running=1, waiting=1),
        ]


STATS = {
    "engine-0": {
        "requests_running": 3,
        "requests_waiting": 2,
        "pages": 200,
        "pages_in_use": 50,
        "steps_total": 7,
    },
    "engine-1": {"requests_running": 1, "steps_total": 9, "no name": 1, "Big": 2, "x" * 99: 3},
}


def read(metrics: Metrics, engines: Any = None) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample -> labels -> value, by Prometheus' own parser."""
    kind, body = asyncio.run(metrics.metrics(engines or Engines(STATS)))
    assert kind.startswith("text/plain; version=")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), f"{sample.name} is told twice"
            found[sample.name][labels] = sample.value
    return found


def chunk(first: int, count: int = 1, reason: Any = None) -> Chunk:
    return Chunk("r1", 0, first, "", list(range(count)), reason)


def served(metrics: Metrics) -> None:
    """One request of five tokens, in three pieces."""
    metrics.on_admitted(EXCHANGE)
    metrics.on_first_token(EXCHANGE, 0.25)
    metrics.on_chunks(EXCHANGE, 0, [chunk(0)], 0.25)
    metrics.on_chunks(EXCHANGE, 0, [chunk(1, 2)], 0.04)
    metrics.on_chunks(EXCHANGE, 0, [chunk(3, 2, "stop")], 0.06)
    metrics.on_finished(EXCHANGE, RECORD)
    metrics.on_http_exchange(ANSWER)


def test_a_request_is_counted_once_everywhere() -> None:
    metrics = Metrics()
    metrics.on_admitted(EXCHANGE)
    assert read(metrics)["sidestream_requests_open"] == {(): 1}
    metrics.on_finished(EXCHANGE, replace(RECORD, status=499, error="client_gone", output_tokens=1))
    served(metrics)
    found = read(metrics)
    assert found["sidestream_requests_open"] == {(): 0}
    request = (("endpoint", "/v1/completions"), ("error", ""), ("model", "sql"), ("status", "200"))
    assert found["sidestream_requests_total"][request] == 1 and len(found["sidestream_requests_total"]) == 2
    for name, value in (("prompt", 20), ("cached", 8), ("output", 6)):
        assert found[f"sidestream_{name}_tokens_total"] == {(("model", "sql"),): value}
    assert found["sidestream_owner_tokens_total"] == {(("owner", "search"),): 26}
    assert found["sidestream_first_token_seconds_sum"] == {(): 0.25}
    assert found["sidestream_inter_token_seconds_count"] == {(): 2}
    assert found["sidestream_inter_token_seconds_sum"] == {(): pytest.approx(0.1)}
    assert found["sidestream_request_token_seconds_sum"] == {(): 0.25}
    assert found["sidestream_completions_total"] == {(("reason", "stop"),): 1}
    http = (("method", "POST"), ("route", "/v1/completions"), ("status", "200"))
    assert found["sidestream_http_requests_total"] == {http: 1}


def test_the_engines_numbers_carry_their_names() -> None:
    found = read(Metrics())
    assert found["sidestream_engine_steps_total"] == {(("engine", "engine-0"),): 7, (("engine", "engine-1"),): 9}
    assert found["sidestream_engine_pages"] == {(("engine", "engine-0"),): 200}, "a number of pages is no counter"
    assert found["sidestream_engine_up"] == {(("engine", "engine-0"),): 1, (("engine", "engine-1"),): 0}
    places = found["sidestream_engine_adapters_at"]
    assert (
        places[("engine", "engine-0"), ("place", "gpu")] == 2 and places[("engine", "engine-1"), ("place", "disk")] == 1
    )
    assert not any("Big" in name or "xxx" in name or " " in name for name in found)


def test_dead_engines_leave_the_gateways_own_numbers() -> None:
    metrics = Metrics(vllm=True)
    served(metrics)
    found = read(metrics, Engines(dead=True))
    assert found["sidestream_engine_up"] and found["sidestream_requests_total"]
    assert "sidestream_engine_steps_total" not in found and not any(name.startswith("vllm:") for name in found)


def test_numbers_of_other_parts_are_read_when_asked_for() -> None:
    numbers_now = {"usage_log_dropped_total": 0, "usage_log_queued": 3}
    metrics = Metrics(component_values=lambda: numbers_now)
    numbers_now["usage_log_dropped_total"] = 2
    found = read(metrics)
    assert found["sidestream_usage_log_dropped_total"] == {(): 2} and found["sidestream_usage_log_queued"] == {(): 3}


def test_clients_cannot_make_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "MAX_MODELS", 3)
    monkeypatch.setattr(numbers, "MAX_OWNERS", 2)
    metrics = Metrics()
    for index in range(50):
        metrics.on_admitted(EXCHANGE)
        metrics.on_finished(EXCHANGE, replace(RECORD, adapter=f"a{index}", owner=f"o{index}"))
        metrics.on_http_exchange(replace(ANSWER, route="", path=f"/wp-{index}.php", method=f"M{index}", status=404))
        metrics.on_http_exchange(replace(ANSWER, status=429, owner=f"o{index}"))
    found = read(metrics)
    assert found["sidestream_output_tokens_total"] == {
        (("model", name),): count for name, count in (("a0", 5), ("a1", 5), ("a2", 5), ("other", 47 * 5))
    }
    assert found["sidestream_owner_refused_total"] == {
        (("owner", name),): count for name, count in (("o0", 1), ("o1", 1), ("other", 48))
    }
    assert found["sidestream_http_requests_total"][("method", "other"), ("route", "other"), ("status", "404")] == 50


# of vLLM 0.11 and later: docs/usage/metrics and what llm-d's scraper reads
VLLM = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting_by_reason",
    "vllm:request_num_preemptions_bucket",
    "vllm:admission_rejections_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:lora_requests_info",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_params_n_count",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_prefill_kv_computed_tokens_sum",
    "vllm:iteration_tokens_total_bucket",
    "vllm:cache_config_info",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "http_requests_total",
    # until vLLM 0.9; its older dashboard queries the first
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total",
)


def test_vllms_names_tell_the_same_numbers() -> None:
    metrics = Metrics(vllm=True)
    served(metrics)
    stats = {
        "engine-0": STATS["engine-0"]
        | {"preemptions_total": 1, "prefix_queries_total": 90, "prefix_hits_total": 40, "page_tokens": 64}
        | {"draft_tokens_total": 9, "accepted_tokens_total": 6, "drafts_total": 4, "prefix_caching": 1}
        | {"planned_steps_total": 7, "planned_tokens_total": 1400, "steps_up_to_1_tokens_total": 2}
        | {"steps_up_to_512_tokens_total": 6, "overloaded_total": 11}
        | {"requests_waiting": 5, "requests_waiting_for_adapters": 2}
    }
    found = read(metrics, Engines(stats))
    assert [name for name in VLLM if not found.get(name)] == []
    both = (("engine", "0"), ("model_name", "llama"))
    assert found["vllm:num_requests_running"] == {both: 3} and found["vllm:kv_cache_usage_perc"] == {both: 0.25}
    assert found["vllm:prompt_tokens_total"] == {both: 10} and found["vllm:generation_tokens_total"] == {both: 5}
    assert found["vllm:request_success_total"] == {(("engine", "0"), ("finished_reason", "stop"), both[1]): 1}
    own, theirs = found["sidestream_first_token_seconds_bucket"], found["vllm:time_to_first_token_seconds_bucket"]
    assert list(own.values()) == list(theirs.values()) and found["vllm:time_to_first_token_seconds_sum"] == {both: 0.25}
    assert found["vllm:gpu_cache_usage_perc"] == found["vllm:kv_cache_usage_perc"]
    assert found["vllm:spec_decode_num_drafts_total"] == {both: 4}
    assert found["vllm:iteration_tokens_total_sum"] == {both: 1400}
    reasons = {dict(labels)["reason"]: value for labels, value in found["vllm:num_requests_waiting_by_reason"].items()}
    assert reasons == {"deferred": 2, "capacity": 3} and found["vllm:num_requests_waiting"] == {both: 5}
    assert found["vllm:admission_rejections_total"] == {both: 11}
    assert found["vllm:request_num_preemptions_sum"] == {both: RECORD.preemptions}
    sizes = {dict(labels)["le"]: value for labels, value in found["vllm:iteration_tokens_total_bucket"].items()}
    assert sizes == {"1.0": 2, "512.0": 6, "+Inf": 7}
    ((labels, value),) = found["vllm:cache_config_info"].items()
    assert value == 1 and dict(labels) == {
        "block_size": "64", "num_gpu_blocks": "200", "enable_prefix_caching": "True", "engine": "0",
        "model_name": "llama", "kv_cache_size_tokens": "12800", "kv_cache_max_concurrency": "3.12",
    }  # fmt: skip
    phases = {name: found[f"vllm:request_{name}_time_seconds_sum"][both] for name in ("queue", "prefill", "decode")}
    assert phases == {"queue": 0.125, "prefill": 0.25, "decode": 0.5}
    assert found["vllm:request_inference_time_seconds_sum"] == {both: 0.75}
    assert found["vllm:request_max_num_generation_tokens_sum"] == {both: 5}
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == {both: 6}
    assert found["vllm:request_params_n_sum"] == {both: 1} and found["vllm:request_params_max_tokens_sum"] == {both: 16}
    page = (("handler", "/v1/completions"), ("method", "POST"), ("status", "2xx"))
    assert found["http_requests_total"] == {page: 1}
    ((labels, _),) = found["vllm:lora_requests_info"].items()
    assert dict(labels) == {"max_lora": "8", "running_lora_adapters": "sql,chat", "waiting_lora_adapters": "chat"}


def test_without_the_option_vllms_names_are_not_there() -> None:
    assert not any(name.startswith("vllm:") for name in read(Metrics()))
