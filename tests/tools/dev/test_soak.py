"""The soak: growth and failed requests are findings, and a run of seconds has none."""

import re

import pytest
from sidestream.tools.dev.chaos.lives import WARM_UP_SECONDS, WINDOW_SECONDS, Life, Lives
from sidestream.tools.dev.chaos.served import Holdings
from sidestream.tools.dev.chaos.soak import findings_of, main


def lives(late: int) -> Lives:
    """Return one process of 1000 bytes, and of `late` bytes in its last window."""
    found, end = Lives(), WARM_UP_SECONDS + 2 * WINDOW_SECONDS
    looks = [
        (age, 0, Holdings(1000 if age < end - WINDOW_SECONDS else late, 1, 1)) for age in range(0, int(end) + 1, 30)
    ]
    found._lives[1] = Life("gateway", 0.0, looks)
    return found


def test_growth_and_failures_are_findings():
    assert findings_of(lives(1009), [], None) == []
    assert findings_of(lives(1010), [], None) == ["gateway: grew by 1.00%"]
    assert findings_of(lives(1000), ["/v1/completions: 500"], 1) == [
        "1 requests failed: /v1/completions: 500",
        "the gateway ended with exit code 1",
    ]


@pytest.mark.first
def test_a_run_of_seconds_answers_requests_and_reports_each_process(capsys):
    """Two servers of the demo model and a gateway."""
    code, said = main(["--minutes", "0.1", "--clients", "2"]), capsys.readouterr().out
    assert code == 0 and "no request failed" in said, said
    assert re.search(r"MiB: gateway [0-9.]+, .*batcher 0 [0-9.]+.*GPU process 1 [0-9.]+", said), said
    assert "growth is not judged: the run was too short" in said
