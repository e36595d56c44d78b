"""Launchers that threads build and load at the same time are not exchanged."""

import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.compiler.run import kernel_compilation
from triton.runtime import build

SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher_of_a_test", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher_of_a_test(void) { return PyModule_Create(&module); }
"""


class Kernel:
    """A kernel that builds and loads its launcher as Triton's do."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.launch: Any = None

    @property
    def run(self) -> Any:
        if self.launch is None:
            module = build.compile_module_from_src(self.source, "launcher_of_a_test")
            time.sleep(0.001)  # another thread runs
            self.launch = module.launch
        return self.launch


def test_each_kernel_has_its_own_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(kernel_compilation, "_launcher_source", lambda kernel: kernel.source)
    monkeypatch.delitem(sys.modules, "launcher_of_a_test", raising=False)
    c_compiler, built = build._build, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        built.append(threading.get_ident())
        return c_compiler(*args, **kwargs)

    monkeypatch.setattr(build, "_build", counted)
    numbers = [place % 6 for place in range(24)]  # kernels with equal arguments share a launcher
    with ThreadPoolExecutor(8) as threads:
        with kernel_compilation._CompileAndLoad(torch.device("cpu"), threads) as mode:
            made = [
                threads.submit(mode.compile_locked, f"kernel {place}", partial(Kernel, SOURCE % number))
                for place, number in enumerate(numbers)
            ]
            assert [future.result().launch() for future in made] == numbers
        assert build._build is counted
    assert len(built) == 6, "each launcher is built once"
    assert len(set(built)) > 1, "at the same time"
