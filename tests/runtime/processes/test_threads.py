"""How soon a thread gets the interpreter lock in a process that runs steps."""

import subprocess
import sys

PROGRAM = """
import sys
from sidestream.runtime.processes import threads
before = sys.getswitchinterval()
threads.switch_threads_often()
print(before, sys.getswitchinterval())
"""


def test_a_thread_waits_a_hundredth_of_the_usual_time() -> None:
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    usual, chosen = map(float, out.split())
    assert 0 < chosen <= usual / 100


def test_the_processes_that_run_steps_switch_often() -> None:
    from sidestream.runtime.server import gpu_process
    from sidestream.runtime.worker.tensor_parallel import rank_process

    for process in (gpu_process, rank_process):
        assert "switch_threads_often" in process.main.__code__.co_names
