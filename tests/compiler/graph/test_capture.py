"""A graph is captured on a full disk, in a process that has not captured one before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CAPTURES = """
import resource, tempfile
import torch
from sidestream.compiler.graph.capture import capture_module

module, given = torch.nn.Linear(3, 2), torch.rand(4, 3)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in (0, hard):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    graph = capture_module(module, (given,)).graph_module
    print(torch.equal(graph(module.weight, module.bias, given)[0], module(given)))
print(tempfile.gettempdir())
"""


@pytest.mark.parametrize("inductor", [None, "inductor"], ids=["no directory named", "the directory of caches named"])
def test_on_a_full_disk(inductor: str | None, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if inductor is not None:  # torch's question for the temporary directory comes later, from another module
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / inductor)
    command = [sys.executable, "-c", CAPTURES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True", str(temporary)]), done.stderr
