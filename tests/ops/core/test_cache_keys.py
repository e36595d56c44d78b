"""Keys of kernels in Triton's cache do not depend on which kernel a process hashes first."""

import subprocess
import sys

import pytest
from sidestream.ops.core.triton_support import INTERPRETED

KEYS = """
import importlib, json, pkgutil, sys
import sidestream.ops
from triton.runtime.jit import JITFunction

found = {}
for each in pkgutil.walk_packages(sidestream.ops.__path__, "sidestream.ops."):
    module = importlib.import_module(each.name)
    found |= {
        f"{each.name}.{name}": value
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("kernel")
    }
names = sorted(found, reverse=sys.argv[1] == "backwards")
print(json.dumps(sorted((name, found[name].cache_key) for name in names)))
"""


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_keys_do_not_depend_on_the_order() -> None:
    forwards, backwards = (
        subprocess.run([sys.executable, "-c", KEYS, order], capture_output=True, text=True, check=True).stdout
        for order in ("forwards", "backwards")
    )
    assert forwards == backwards and forwards.count("kernel") > 50
