"""Figures, a live line and tables of `sidestream bench serve`, from records of requests."""

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..throughput import percentile


@dataclass
class Record:
    """One request of a client; times in seconds since the start of the run.

    planned, sent  due time and time of sending; the time to the first token counts from the due time, so that a slow
                   sender is visible
    gaps           seconds between consecutive chunks of tokens; `tokens_in_gap`: tokens of the chunk at each gap's end
    error          code of the error; None: no error
    """

    planned: float
    sent: float = 0.0
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    wanted: int = 0
    adapter: str | None = None
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    tokens_in_gap: "array[int]" = field(default_factory=lambda: array("l"))
    finished: bool = False
    error: str | None = None

    def arrived(self, now: float, tokens: int) -> None:
        """Record a chunk."""
        if tokens == 0:
            return
        if self.first is None:
            self.first = now
        elif self.last is not None:
            self.gaps.append(now - self.last)
            self.tokens_in_gap.append(tokens)
        self.last = now
        self.tokens += tokens

    @property
    def complete(self) -> bool:
        """Return whether the whole answer arrived."""
        return self.finished and self.error is None and self.first is not None

    @property
    def time_to_first(self) -> float:
        """Return seconds from the due time to the first token; infinite without one."""
        return math.inf if self.first is None else self.first - self.planned

    @property
    def mean_gap(self) -> float:
        """Return seconds per token after the first; 0 for an answer of one token."""
        return (
            0.0
            if self.first is None or self.last is None or self.tokens < 2
            else (self.last - self.first) / (self.tokens - 1)
        )


def token_gaps(records: Sequence[Record]) -> list[float]:
    """Return the latency of every token after a request's first one: each of k tokens after a gap g counts as g / k."""
    return [
        gap / count
        for record in records
        for gap, count in zip(record.gaps, record.tokens_in_gap, strict=True)
        for _ in range(count)
    ]


def summarize(
    records: Sequence[Record],
    seconds: float,
    slo_ttft: float,
    slo_gap: float,
    stall: float,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> dict[str, Any]:
    """Return the figures of a run of `seconds`, in milliseconds and per second.

    A request is good if it is complete, its first token arrived within `slo_ttft` seconds, and its mean inter-token
    latency is at most `slo_gap`. A stall is a gap between two chunks of a request above `stall` seconds. `before` and
    `after` are the server's counters.
    """
    complete = [record for record in records if record.complete]
    good = [record for record in complete if record.time_to_first <= slo_ttft and record.mean_gap <= slo_gap]
    first = [1e3 * record.time_to_first for record in records if record.first is not None]
    between = [1e3 * gap for gap in token_gaps(records)]
    gaps = [gap for record in records for gap in record.gaps]
    hits, misses = (delta(before, after, f"adapter_{name}_total") for name in ("hits", "misses"))
    return {
        "requests": len(records),
        "complete": len(complete),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "seconds": seconds,
        "offered_per_s": len(records) / seconds,
        "goodput_per_s": len(good) / seconds,
        "goodput_share": len(good) / len(records) if records else math.nan,
        "output_tokens_per_s": sum(record.tokens for record in records) / seconds,
        "ttft_ms": {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)},
        "inter_token_ms": {"p50": percentile(between, 0.5), "p99": percentile(between, 0.99)},
        "stalls": sum(gap > stall for gap in gaps),
        "longest_gap_ms": 1e3 * max(gaps, default=math.nan),
        "adapter_hit_rate": None if hits is None or misses is None or hits + misses == 0 else hits / (hits + misses),
        "preemptions": delta(before, after, "preemptions_total"),
        "sender_late_p99_ms": percentile([1e3 * (record.sent - record.planned) for record in records], 0.99),
    }


def delta(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    """Return the increase of a counter; None if the server does not have it."""
    return None if name not in after else after[name] - before.get(name, 0)


def live_line(records: Sequence[Record], now: float, window: float = 5.0) -> str:
    """Return one line of progress; latencies are those of the last `window` seconds."""
    sent = [record for record in records if record.sent > 0 or record.first is not None]
    done, failed = sum(record.complete for record in sent), sum(record.error is not None for record in sent)
    recent = [record for record in sent if record.first is not None and record.first > now - window]
    active = [record for record in sent if record.last is not None and record.last > now - window]
    first = percentile([1e3 * record.time_to_first for record in recent], 0.5)
    gaps = percentile([1e3 * gap for record in active for gap in record.gaps[-20:]], 0.99)
    tokens = sum(record.tokens for record in sent)
    return (
        f"{now:6.1f} s  sent {len(sent)}/{len(records)}  running {len(sent) - done - failed}  done {done}  failed "
        f"{failed}  "
        f"{tokens / max(now, 1e-9):.0f} tok/s  TTFT p50 {shown(first)} ms  gap p99 {shown(gaps)} ms"
    )


def shown(value: float | None, digits: int = 1) -> str:
    """Return a number for a table, or a dash."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


COLUMNS = (
    "rate/s",
    "requests",
    "complete",
    "goodput/s",
    "tok/s",
    "TTFT p50",
    "p99",
    "inter-token p50",
    "p99",
    "stalls",
    "longest",
    "hit rate",
)


def header() -> str:
    """Return the head of the table of workload S; times in milliseconds."""
    return "  ".join(COLUMNS)


def line(rate: float, figures: Mapping[str, Any]) -> str:
    """Return the line of one run."""
    hit_rate, first, between = figures["adapter_hit_rate"], figures["ttft_ms"], figures["inter_token_ms"]
    cells = (
        f"{rate:g}",
        str(figures["requests"]),
        str(figures["complete"]),
        shown(figures["goodput_per_s"], 2),
        shown(figures["output_tokens_per_s"], 0),
        shown(first["p50"]),
        shown(first["p99"]),
        shown(between["p50"], 2),
        shown(between["p99"], 2),
        str(figures["stalls"]),
        shown(figures["longest_gap_ms"]),
        "-" if hit_rate is None else f"{hit_rate:.0%}",
    )
    return "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, COLUMNS, strict=True))


def engine_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return figures per step from the server's counters before and after a run."""
    change = {name: after[name] - before[name] for name in after if name.endswith("_total")}
    steps = max(1.0, change["steps_total"])
    busy, idle = change["gpu_step_seconds_total"], change["gpu_idle_seconds_total"]
    return {
        "steps": steps,
        "sequences_per_step": change["tokens_total"] / steps,
        "step_ms": 1e3 * busy / steps,
        "batcher_ms_per_step": 1e3 * change["batcher_step_seconds_total"] / steps,
        "plan_ms_per_step": 1e3 * change["plan_seconds_total"] / steps,
        "batcher_cpu_ms_per_step": 1e3 * change["cpu_seconds_total"] / steps,
        "launch_ms_per_step": 1e3 * change["launch_seconds_total"] / steps,
        "late_plans_share": change["late_plans_total"] / steps,
        "gpu_idle_us_per_step": 1e6 * idle / steps,
        "gpu_idle_share": idle / max(1e-9, busy + idle),
    }


def longest_gap(arrivals: Sequence[Sequence[float]], start: float, end: float) -> float:
    """Return the longest time within [start, end] (seconds) without a chunk of one of the streams.

    `arrivals` has the chunk times of each stream. Only the part of a gap inside the window counts. A stream that begins
    or ends inside the window counts between its first and last chunk.
    """
    longest = 0.0
    for times in arrivals:
        inside = [min(max(moment, start), end) for moment in times]
        longest = max([longest, *(later - earlier for earlier, later in itertools.pairwise(inside))])
    return longest
