"""kill -9 of engines of the demo model behind the router. The same over a model that is a hash is part of `make test`:
tests/runtime/gateway/router/test_router.py.
"""

import pytest
from sidestream.tools.dev.chaos.router_kills import main


def test_no_request_fails_and_every_answer_is_exact(pytestconfig, capsys):
    if not pytestconfig.getoption("--exhaustive"):
        pytest.skip("three servers of the demo model and 20 kills take minutes; run with --exhaustive")
    code, said = main(["--kills", "20", "--seed", "1"]), capsys.readouterr().out
    assert code == 0 and "0 wrong, 0 failed" in said, said
