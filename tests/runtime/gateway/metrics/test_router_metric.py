"""vllm:lora_requests_info as the routers of llm-d and of the Gateway API's inference extension read it."""

import asyncio
import time
from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from sidestream.runtime.gateway.interfaces import AdapterCard
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import CompositeObserver
from support.gateway import FakeEngines, gateway


def read_as_a_router(text: str) -> tuple[set[str], set[str], int] | None:
    """Active and waiting adapters and the number of slots.

    The routers take the sample with the highest value among those with an adapter, and split its labels at commas
    without stripping white space.
    """
    family = next(each for each in text_string_to_metric_families(text) if each.name == "vllm:lora_requests_info")
    assert family.type == "gauge"
    used = [
        each for each in family.samples if each.labels["running_lora_adapters"] or each.labels["waiting_lora_adapters"]
    ]
    if not used:
        return None
    labels = max(used, key=lambda each: each.value).labels
    running, waiting = (set(labels[f"{which}_lora_adapters"].split(",")) - {""} for which in ("running", "waiting"))
    return running, waiting, int(labels["max_lora"])


def scrape(cards: list[AdapterCard]) -> str:
    async def scene() -> Any:
        engines = FakeEngines()
        engines.cards, engines.info = cards, replace(engines.info, max_adapters=4)
        async with gateway(engines, observer=CompositeObserver(Metrics(vllm=True))) as http:
            return (await http.get("/metrics")).text

    return str(asyncio.run(scene()))


def test_a_router_reads_active_and_waiting_adapters() -> None:
    pirate, shout = AdapterCard("pirate", 8, "aa", running=2), AdapterCard("shout", 4, "bb", running=1, waiting=3)
    sql, idle = AdapterCard("sql-v1.2", 4, "cc", waiting=1), AdapterCard("idle", 4, "dd")
    assert read_as_a_router(scrape([pirate, shout, sql, idle])) == ({"pirate", "shout"}, {"shout", "sql-v1.2"}, 4)
    assert read_as_a_router(scrape([idle])) is None


def test_the_value_is_the_time_so_that_the_latest_sample_is_found() -> None:
    before = time.time()
    text = scrape([AdapterCard("pirate", 8, "aa", running=1)])
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert before <= float(line.split()[-1]) <= time.time()
