"""The header `endpoint-load-metrics` (ORCA): the engines' load beside an answer, for load balancers that ask for it."""

import json
from collections.abc import Mapping

FORMAT_HEADER = "endpoint-load-metrics-format"
"""Header of requests: TEXT or JSON."""
HEADER = "endpoint-load-metrics"


def load_report(form: str, stats: Mapping[str, Mapping[str, int | float]]) -> dict[str, str]:
    """Return the header with vLLM's names and values, over all engines; nothing for another format.

    form   value of FORMAT_HEADER; `stats`: counters and gauges by engine

    Format: https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto
    """
    pages = sum(values.get("pages", 0) for values in stats.values())
    used = sum(values.get("pages_in_use", 0) for values in stats.values())
    waiting = sum(values.get("requests_waiting", 0) for values in stats.values())
    named = {"kv_cache_usage_perc": used / pages if pages else 0.0, "num_requests_waiting": float(waiting)}
    if form.lower() == "text":
        return {HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())}
    if form.lower() == "json":
        return {HEADER: f"JSON {json.dumps({'named_metrics': named})}"}
    return {}
