"""Adapters of the demo model are replaced behind two gateways. The same with fake engines is part of `make test`:
tests/runtime/gateway/router/test_adapter_changes.py.
"""

import math

import pytest
from sidestream.tools.dev.chaos.adapter_changes import Change, possible
from sidestream.tools.dev.chaos.adapter_storm import main


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


def test_every_answer_is_that_of_an_acknowledged_version(pytestconfig, capsys):
    if not pytestconfig.getoption("--exhaustive"):
        pytest.skip("two servers of the demo model take minutes; run with --exhaustive")
    code, said = main(["--minutes", "3", "--seed", "1"]), capsys.readouterr().out
    assert code == 0 and " 0 wrong" in said, said
