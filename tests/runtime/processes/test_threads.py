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
