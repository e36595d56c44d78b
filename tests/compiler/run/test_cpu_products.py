"""On a CPU a row of a program has the same product alone as among others, whatever kernels the libraries have."""

from typing import Any

import pytest
import torch
from sidestream.compiler.build_program import build_program
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.run.bound_program import BoundProgram
from support.fx_graphs import GraphBuilder, static_inputs
from support.other_kernels import OtherKernels
from support.processor import processor_name

aten = torch.ops.aten
K, N = 512, 640


def bound(op: Any, rows: int, weight: torch.Tensor) -> tuple[BoundProgram, torch.Tensor]:
    build = GraphBuilder(dynamic=False)
    x = build.input("x", (rows, K), weight.dtype)
    module = build.finish(build.call(op, x, build.weight("w", tuple(weight.shape), weight.dtype)))
    row = torch.empty(rows, K, dtype=weight.dtype)
    program = build_program(module, static_inputs(module), CompileOptions())
    return BoundProgram(program, {"x": row, "w": weight}, poison=True), row


def test_a_bias_is_added_however_it_is_given() -> None:
    weight, bias = torch.randn(N, K).bfloat16(), torch.randn(N).bfloat16()
    for named in (False, True):
        build = GraphBuilder(dynamic=False)
        x, w = build.input("x", (1, K), torch.bfloat16), build.weight("w", (N, K), torch.bfloat16)
        b = build.weight("b", (N,), torch.bfloat16)
        given, more = ((x, w), {"bias": b}) if named else ((x, w, b), {})
        module = build.finish(build.call(aten.linear.default, *given, **more))
        row = torch.randn(1, K).bfloat16()
        program = build_program(module, static_inputs(module), CompileOptions())
        (found,) = BoundProgram(program, {"x": row, "w": weight, "b": bias}, poison=True).run()
        expected = torch.nn.functional.linear(row.double(), weight.double(), bias.double())
        assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("op", [aten.linear.default, aten.mm.default])
def test_its_sums_are_those_of_several_rows(op: Any, dtype: torch.dtype) -> None:
    weight = torch.randn((N, K) if op is aten.linear.default else (K, N)).to(dtype)
    x = torch.randn(30, K).to(dtype)
    many, rows = bound(op, len(x), weight)
    rows.copy_(x)
    (expected,) = many.run()
    alone, row = bound(op, 1, weight)
    for index in range(len(x)):
        row.copy_(x[index])
        with OtherKernels(index) as kernels:
            (product,) = alone.run()
        assert torch.equal(product[0], expected[index]), processor_name()
        assert set(kernels.products) == {torch.float64}, "a product in fewer bits is left to the library"
    exact = x.double() @ (weight.T if op is aten.linear.default else weight).double()
    assert torch.equal(expected, exact.to(dtype))
