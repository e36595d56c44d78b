"""kill -9 of replicas, GPU processes and nodes of a cluster of raylets, under load: `python -m
sidestream.tools.dev.fleet.chaos` for a minute.
"""

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")


def test_nodes_die_and_no_answer_is_lost(request):
    if not request.config.getoption("--exhaustive"):
        pytest.skip("takes minutes; --exhaustive runs it")
    command = [sys.executable, "-m", "sidestream.tools.dev.fleet.chaos", "--engines", "2", "--streams", "6"]
    command += ["--minutes", "1", "--every", "10", "--scales", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong, 0 failed\n" in done.stdout
    assert "'node': " in done.stdout
