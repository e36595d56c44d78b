"""Adapters of the demo model are replaced behind two gateways. The same with fake engines is part of `make test`:
tests/runtime/gateway/router/test_adapter_changes.py.
"""

import math
import re
from types import SimpleNamespace

import pytest
from sidestream.runtime.gateway.auth.usage_log import UsageLog
from sidestream.runtime.gateway.interfaces import UsageRecord
from sidestream.tools.dev.chaos.adapter_changes import Change, possible, prune
from sidestream.tools.dev.chaos.adapter_storm import CUT, TOKENS, Reply, Storm, main


def record(request_id: str, content: str) -> UsageRecord:
    return UsageRecord(0.0, request_id, "/v1/completions", "all", "", "demo", "q0", content, 1, 8, 0, 0.1, 0.1, 200)


def test_a_version_may_answer_until_a_later_one_is_acknowledged():
    first, second = Change("a", 0.0, 1.0, 1.0), Change("b", 5.0, 6.0, 6.0)
    assert possible([first], -2.0, -1.0) == {None}
    assert possible([first], 0.5, 0.6) == {None, "a"}
    assert possible([first, second], 2.0, 3.0) == {"a"}
    assert possible([first, second], 2.0, 5.5) == possible([first, second], 5.5, 7.0) == {"a", "b"}
    assert possible([first, second], 7.0, 8.0) == {"b"}
    failed = Change("c", 7.0, 8.0)
    assert possible([first, second, failed], 9.0, 9.5) == {"b", "c"}, "it may have reached an engine"
    assert possible([first, second, failed, Change(None, 10.0, 11.0, 11.0)], 12.0, 13.0) == {None}
    at_one = Change("d", 7.0, 8.0, 8.0, everywhere=False)
    assert possible([second, at_one], 9.0, 9.5) == {"b", "d"}
    assert possible([second, at_one], 9.0, math.inf, everywhere=False) == {"d"}


def test_changes_that_no_request_can_see_are_removed():
    first, second, failed = Change("a", 0.0, 1.0, 1.0), Change("b", 5.0, 6.0, 6.0), Change("c", 7.0, 8.0)
    changes = [first, second, failed]
    prune(changes, 5.5)
    assert changes == [first, second, failed]
    prune(changes, 6.5)
    assert changes == [second, failed]
    assert possible(changes, 9.0, 9.5) == possible([first, second, failed], 9.0, 9.5)


def judged(reply: Reply, allowed: set[str | None]) -> dict[str, int]:
    storm = Storm([], [], [])
    storm.versions = {"text a": "a", "text b": "b"}
    storm.judge("q0", "g0-1", reply, allowed, 0.1)
    return {kind: len(lines) for kind, lines in storm.seen.findings.items() if lines}


def test_each_reply_that_must_not_occur_is_a_finding():
    assert judged(Reply("text a", TOKENS), {"a"}) == judged(Reply("text b", TOKENS), {"a", "b"}) == {}
    assert judged(Reply("text b", TOKENS), {"a"}) == {"wrong": 1}
    assert judged(Reply("text", TOKENS), {"a", "b"}) == {"wrong": 1}
    assert judged(Reply("text atext a", 2 * TOKENS), {"a"}) == {"wrong": 1, "doubled": 1}
    assert judged(Reply("te", 0, CUT), {"a", None}) == {"lost": 1}
    assert judged(Reply("", 0, "404 model_not_found"), {"a", None}) == {}
    assert judged(Reply("", 0, "404 model_not_found"), {"a"}) == {"lost": 1}
    assert judged(Reply("te", 0, "in a stream: adapter_changed"), {"a", "b"}) == {}
    assert judged(Reply("te", 0, "in a stream: adapter_changed"), {"a"}) == {"lost": 1}
    assert judged(Reply("", 0, "503 engine_dead"), {"a", "b"}) == {"lost": 1}
    assert judged(Reply("", 0, "500 internal_error"), {"a"}) == {"HTTP 500": 1, "lost": 1}


def test_answers_are_compared_with_usage_records(tmp_path):
    logs = [UsageLog(tmp_path / f"{place}.db") for place in range(2)]
    for log, request_id, content in [(0, "r1", "a"), (0, "r2", "b"), (0, "r3", "a"), (1, "r3", "a")]:
        logs[log].put(record(request_id, content))
    for log in logs:
        log.close()
    storm = Storm([SimpleNamespace(usage_log=log.path) for log in logs], [], [])
    storm._answered = {"r1": "a", "r2": "a", "r3": "a", "r4": "a"}
    storm.check_usage_logs()
    found = {kind: [line.partition(":")[0] for line in lines] for kind, lines in storm.seen.findings.items() if lines}
    assert found == {"wrong": ["r2"], "doubled": ["r3"], "lost": ["r4"]}


@pytest.mark.first
def test_a_short_storm_has_no_findings(pytestconfig, capsys):
    """Two servers and two gateways of the demo model."""
    length = ["--minutes", "3"] if pytestconfig.getoption("--exhaustive") else ["--minutes", "0.2", "--kill-every", "4"]
    code, said = main([*length, "--seed", "1"]), capsys.readouterr().out
    assert code == 0 and "0 wrong, 0 lost, 0 doubled, 0 HTTP 500, 0 traceback\n" in said, said
    for outcome in ("kill: ", "load: acknowledged", "request: answered"):
        assert re.search(rf"^ +[1-9][0-9]* {outcome}", said, re.MULTILINE), said
