"""What kernels take of a GPU, compiled for sm_90 without one: real machine code of the programs' own launches."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sidestream.compiler.cost.kernel_resources import Resources, launched_kernels, program_resources
from sidestream.compiler.cost.machine_code import HOPPER, compile_launch, target_here
from sidestream.compiler.program.program import Program
from sidestream.ops.core.registry import OPS
from sidestream.ops.core.triton_support import INTERPRETED
from sidestream.tools import cli
from support.dumped import data_of
from support.meta_model import DECODE, compiled_llama, config_directory

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under TRITON_INTERPRET=1")


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled_llama().program(DECODE)


@pytest.fixture(scope="module")
def found(program: Program) -> Resources:
    return program_resources([program])


def test_every_step_launches_kernels_with_figures(program: Program, found: Resources) -> None:
    assert found.refused == {} and found.target == f"sm_{target_here().arch}" and HOPPER.arch == 90
    for step, own in zip(program.steps, found.launches[program.name], strict=True):
        assert bool(own) == step.op.startswith("sidestream."), step.op
    for _, figures in found.variants:
        assert (
            8 <= figures["registers"] <= 255
            and 0 <= figures["shared_bytes"] <= 232448
            and figures["warps"] in range(1, 33)
            and 0 <= figures["spills"] < 64
        )


def test_kernels_are_named_as_on_the_page_and_the_largest_variant_counts(program: Program, found: Resources) -> None:
    from sidestream.compiler.inspect.page.kernel_sources import kernel_sources

    functions = kernel_sources(step.op for step in program.steps).functions
    assert set(found.kernels) <= {name for name, entry in functions.items() if entry["kind"] == "kernel"}
    several = {name for name, _ in found.variants if sum(other == name for other, _ in found.variants) > 1}
    assert several, "some kernel is compiled in more than one way"
    for name in several:
        for key, value in found.kernels[name].items():
            assert value == max(figures[key] for other, figures in found.variants if other == name)


def test_launches_are_named_alike_without_compiling(program: Program, found: Resources) -> None:
    named = launched_kernels([program])[program.name]
    assert named == [[found.variants[place][0] for place in own] for own in found.launches[program.name]]
    assert len({name for own in named for name in own}) > 5


def test_a_launch_that_needs_a_device_goes_without_names(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, **__: object) -> None:
        raise RuntimeError("no such device")

    whole = launched_kernels([program])[program.name]
    monkeypatch.setitem(OPS, "embedding", replace(OPS["embedding"], launch=launch))
    for step, named, before in zip(program.steps, launched_kernels([program])[program.name], whole, strict=True):
        assert named == ([] if step.op == "sidestream.embedding" else before)


def test_equal_launches_are_compiled_once(program: Program) -> None:
    seen = []
    program_resources([replace(program, steps=program.steps[:4])] * 2, lambda launches: seen.extend(launches) or [])
    assert 0 < len(seen) <= 4 == len(program.steps[:4])
    whole = []
    program_resources([program], lambda launches: whole.extend(launches) or [])
    assert len(whole) == len(set(whole)) < sum(step.op.startswith("sidestream.") for step in program.steps)


def test_a_kernel_that_cannot_be_compiled_is_named_and_loses_nothing_else(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ValueError("K is 24; it must be a multiple of 16\nand more lines")

    start = replace(program, steps=program.steps[:5])
    found = program_resources([start])
    monkeypatch.setitem(OPS, "embedding", replace(OPS["embedding"], launch=broken))
    again = program_resources([start])
    assert again.refused == {"sidestream.embedding": "ValueError: K is 24; it must be a multiple of 16"}
    assert set(found.kernels) - set(again.kernels) == {"ops.elementwise.embedding._embedding_kernel"} and again.kernels


def test_the_arguments_of_a_launch_decide_its_machine_code(program: Program) -> None:
    import torch

    x = torch.empty(4, 128, dtype=torch.bfloat16, device="meta")
    norm, weight = OPS["rms_norm"], torch.empty(128, dtype=torch.bfloat16, device="meta")
    plain, early = (
        compile_launch(norm.launch, x, weight, 1e-5, out=(norm.fake(x, weight, 1e-5),), pdl=pdl)[0]
        for pdl in (False, True)
    )
    assert plain.function == "sidestream.ops.elementwise.rms_norm._rms_norm_kernel" and plain.instructions > 20
    assert not plain.ptx_count("griddepcontrol") and early.ptx_count("griddepcontrol")


def test_the_command_shows_them_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_directory(tmp_path / "model", num_hidden_layers=1)
    arguments = ["inspect", "dump", str(tmp_path / "model"), "--bucket", "8", "--max-loras", "4"]
    assert cli.main([*arguments, "-o", str(tmp_path / "plain")]) == 0
    assert cli.main([*arguments, "-o", str(tmp_path / "shown"), "--resources"]) == 0
    shown, plain = (data_of((tmp_path / name / "index.html").read_text()) for name in ("shown", "plain"))
    resources = {name: entry["resources"] for name, entry in shown["functions"].items() if "resources" in entry}
    assert resources["ops.elementwise.embedding._embedding_kernel"]["registers"] > 8 and "variants" not in plain
    assert not any("seconds" in each for each in shown["passes"])
    assert json.loads((tmp_path / "shown" / "timings.json").read_text())["kernels"] == resources
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    differing = [
        name for name in names if (tmp_path / "plain" / name).read_bytes() != (tmp_path / "shown" / name).read_bytes()
    ]
    assert differing == ["index.html", "timings.json"], "everything else stays as it is"
