"""What holds for every registered op: schema, fake and reference agree (`torch.library.opcheck`)."""

from typing import Any

import pytest
import sidestream.ops.all_ops  # noqa: F401  registers the ops
import support.moe_gemm_samples
import support.moe_samples  # noqa: F401  samples of more ops
import torch
from sidestream.ops.core.registry import OPS
from support.samples import SAMPLES

OURS = sorted(name for name, op in OPS.items() if op.reference.__module__.startswith("sidestream.ops."))
"""The package's ops; the evaluation registers emulated ones of its own."""

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", OURS)
def test_opcheck(name: str) -> None:
    assert name in SAMPLES, f"op {name} has no samples: add a function to tests/support/samples.py"
    op = OPS[name]
    for args in SAMPLES[name]():
        # torch compares arguments before and after by arithmetic that CPU tensors of float8 lack: no schema check for
        # those
        float8 = any(_is_float8(value) for value in (*args, *_results(op.reference(*(_clone(arg) for arg in args)))))
        torch.library.opcheck(op.overload, args, test_utils=CHECKS[1:] if float8 else CHECKS)


@pytest.mark.parametrize("name", OURS)
def test_fake_has_the_shapes_of_the_reference(name: str) -> None:
    for args in SAMPLES[name]():
        real, fake = _results(OPS[name].reference(*(_clone(arg) for arg in args))), _results(OPS[name].fake(*args))
        assert [(t.shape, t.dtype, t.stride()) for t in real] == [(t.shape, t.dtype, t.stride()) for t in fake]


def _is_float8(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _results(result: Any) -> tuple[torch.Tensor, ...]:
    if result is None:
        return ()
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
