"""How soon a thread gets the interpreter lock in a process that runs steps; types that threads share."""

import subprocess
import sys
from pathlib import Path

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


def test_types_are_prepared_at_import() -> None:
    """Two threads that are the first to decode a type crash the process (msgspec 0.22): see `prepare_types`."""
    program = Path(__file__).with_name("prepared_types.py")
    assert subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True).stdout == ""
