"""Figures and tables of `sidestream bench http`."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from .closed_loop import ClientFigures
from .report import percentile, shown

HEAD = (
    f"{'':>10} {'':>6} {'tokens/s':>8} {'first p50':>9} {'p99':>7} {'gap p50':>7} {'p99':>7} {'late plans':>10} "
    f"{'GPU idle':>8} {'client':>6} {'gateway':>7}"
)


def row(
    clients: Sequence[ClientFigures], engine: Mapping[str, float], seconds: float, gateway: float | None
) -> dict[str, float]:
    """Return the figures of one measurement, times in milliseconds. `gateway`: its CPU seconds, None if unknown."""
    first = [1e3 * value for each in clients for value in each.first_tokens]
    gaps = [1e3 * value for each in clients for value in each.gaps]
    return {
        "tokens_per_s": sum(each.tokens for each in clients) / seconds,
        "requests": sum(each.requests for each in clients),
        "first_p50_ms": percentile(first, 0.5),
        "first_p99_ms": percentile(first, 0.99),
        "gap_p50_ms": percentile(gaps, 0.5),
        "gap_p99_ms": percentile(gaps, 0.99),
        "busiest_client_share": max(each.cpu_seconds for each in clients) / seconds,
        "gateway_share": math.nan if gateway is None else gateway / seconds,
        **{f"engine_{name}": value for name, value in engine.items()},
    }


def line(workload: str, arm: str, figures: Mapping[str, float]) -> str:
    """Return one measurement as a line under HEAD."""
    return (
        f"{workload:>10} {arm:>6} {figures['tokens_per_s']:>8.0f} {figures['first_p50_ms']:>9.2f} "
        f"{figures['first_p99_ms']:>7.2f} {figures['gap_p50_ms']:>7.2f} {figures['gap_p99_ms']:>7.2f} "
        f"{figures['engine_late_plans_share']:>10.2%} {figures['engine_gpu_idle_share']:>8.2%} "
        f"{figures['busiest_client_share']:>6.0%} {shown(1e2 * figures['gateway_share'], 0):>6}%"
    )


def summary(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, list[float]]:
    """Return HTTP relative to ZeroMQ for each pair: the share of tokens per second, and the delay of first tokens."""
    return {
        "tokens_per_s_share": [http["tokens_per_s"] / zeromq["tokens_per_s"] for zeromq, http in pairs],
        **{
            f"first_{name}_later_ms": [http[f"first_{name}_ms"] - zeromq[f"first_{name}_ms"] for zeromq, http in pairs]
            for name in ("p50", "p99")
        },
    }


def summary_lines(workload: str, compared: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the summary as lines: medians, and the range of the pairs."""
    shares = compared["tokens_per_s_share"]
    lines = [f"{workload}: HTTP has {median(shares):.2%} of ZeroMQ's tokens/s ({min(shares):.2%} to {max(shares):.2%})"]
    for name in ("p50", "p99"):
        later = compared[f"first_{name}_later_ms"]
        lines.append(f"  first token {name} {median(later):+.2f} ms ({min(later):+.2f} to {max(later):+.2f})")
    return lines
