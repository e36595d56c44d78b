"""What all kernels ask of Triton."""

import subprocess
import sys

ASKED = """
from sidestream.ops.core import triton_support
from triton import knobs
enabled = getattr(knobs.language, "fp_fusion_enabled", lambda requested: knobs.language.default_fp_fusion)
print(enabled(None))
"""


def test_products_and_sums_become_one_instruction_without_a_warning() -> None:
    """Whatever Triton's default is: the bits of results depend on it."""
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", ASKED], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
