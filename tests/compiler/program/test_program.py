"""Programs as data: JSON and back, what is refused on load, the store and its keys."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.compiler.build_program import build_program
from sidestream.compiler.graph.recipe import cat, item, param, quantize
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.buffers import Buffer, ProgramError, View
from sidestream.compiler.program.cache import LIMIT, ProgramCache, program_key
from sidestream.compiler.program.cache_folder import CacheFolder
from sidestream.compiler.program.program import Bucket, Program, Step
from sidestream.ops.core.registry import OPS
from support.fx_graphs import GraphBuilder

BUCKET = Bucket(tokens=4, sequences=4, pages=8, blocks=2, decode=True)


def small(**changes: Any) -> Program:
    """x -> main step -> t -> side step -> y."""
    x, t, y = View("x", (4, 8), (8, 1)), View("t", (4, 8), (8, 1)), View("y", (4, 8), (8, 1))
    odd = (
        x,
        2,
        1.5,
        True,
        None,
        "text",
        torch.bfloat16,
        float("-inf"),
        (x, (1, 2), ()),
        torch.contiguous_format,
        torch.device("meta"),
    )
    fields: dict[str, Any] = {
        "bucket": BUCKET,
        "buffers": (
            Buffer("x", "input", (4, 8), torch.float32),
            Buffer("w", "weight", (8, 8), torch.float8_e4m3fn),
            Buffer("t", "temp", (4, 8), torch.float32, 256, (0, 1)),
            Buffer("y", "output", (4, 8), torch.float32),
        ),
        "steps": (
            Step(
                0,
                "first",
                "aten.relu.default",
                odd,
                (t,),
                records=True,
                sm_budget=99,
                kwargs=(("dtype", torch.float32), ("layout", torch.strided)),
            ),
            Step(
                1, "second", "aten.relu.default", (View("t", (2, 8), (8, 1), 16),), (y,), "side", waits=(0,), pdl=True
            ),
        ),
        "arena_bytes": 512,
        "outputs": (y, 3, None),
        "recipes": {"w": item(quantize(cat(0, [param("a"), param("b")])), 0)},
    }
    return Program(**{**fields, **changes})


def changed(program: Program, step: int, **changes: Any) -> tuple[Step, ...]:
    return tuple(dataclasses.replace(each, **changes) if each.index == step else each for each in program.steps)


def test_a_text_holds_the_whole_program() -> None:
    program = small()
    assert Program.decoded(program.encoded()) == program
    json.loads(program.encoded(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_built_program_survives_too() -> None:
    build = GraphBuilder()
    x = build.input("input_ids", ("T",), torch.int64)
    hidden = build.call(OPS["embedding"], x, build.weight("table", (16, 32), torch.bfloat16))
    norm = build.call(OPS["rms_norm_quant"], hidden, build.weight("norm", (32,), torch.bfloat16), 1e-5, True)
    module = build.finish(build.pick(norm, 0), build.pick(norm, 1))
    for bucket in (BUCKET, None):
        program = build_program(
            module,
            bucket
            or {"input_ids": ((3,), torch.int64), "table": ((16, 32), torch.bfloat16), "norm": ((32,), torch.bfloat16)},
        )
        assert program.bucket == bucket
        assert Program.decoded(json.dumps(program.to_json()).encode()) == program


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": (Step(0, "s", "aten.relu.default", (View("gone", (1,), (1,)),), ()),)}, "unknown buffer 'gone'"),
        ({"steps": (Step(0, "s", "aten.relu.default", (View("x", (5, 8), (8, 1)),), ()),)}, "does not fit buffer 'x'"),
        ({"steps": (Step(0, "s", "aten.relu.default", (View("x", (4,), (8, 1)),), ()),)}, "does not fit buffer 'x'"),
        ({"steps": (Step(1, "s", "aten.relu.default", (), ()),)}, "index 1 at position 0"),
        ({"steps": (Step(0, "s", "aten.relu.default", (), (), "third"),)}, "unknown stream"),  # type: ignore[arg-type]
        ({"steps": changed(small(), 1, waits=(1,))}, "waits for 1"),
        ({"steps": changed(small(), 1, stream="main")}, "waits for 0"),
        ({"steps": changed(small(), 0, records=False)}, "waits for 0"),
        ({"arena_bytes": 300}, "outside the arena"),
        (
            {"buffers": (Buffer("x", "input", (4, 8), torch.float32),) * 2, "steps": (), "outputs": ()},
            "two buffers are named 'x'",
        ),
        ({"buffers": (Buffer("x", "temp", (4, 8), torch.float32),), "steps": (), "outputs": ()}, "offset in the arena"),
        ({"buffers": (Buffer("x", "thing", (4,), torch.float32),), "steps": (), "outputs": ()}, "unknown kind"),  # type: ignore[arg-type]
        ({"outputs": (View("x", (4, 9), (9, 1)),)}, "an output"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        small(**changes)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda data: data.update(version=99), "version 99"),
        (lambda data: data.pop("steps"), "malformed program: KeyError"),
        (lambda data: data["buffers"][0].update(dtype="float3"), "unknown dtype 'float3'"),
        (lambda data: data["steps"][0]["args"].append({"code": "x"}), "unknown value"),
        (lambda data: data["steps"][0].update(surprise=1), "malformed program: TypeError"),
        (lambda data: data["bucket"].update(tokens=0), "tokens=0"),
        (lambda data: data["recipes"].update(w={"op": "eval", "args": [], "attrs": {}}), "unknown recipe op"),
    ],
)
def test_a_damaged_text_is_refused(edit: Any, says: str) -> None:
    data = small().to_json()
    edit(data)
    with pytest.raises(ProgramError, match=says):
        Program.decoded(json.dumps(data).encode())


def test_other_texts_are_no_programs() -> None:
    with pytest.raises(ProgramError, match="not JSON"):
        Program.decoded(b"{")
    with pytest.raises(ProgramError, match="JSON object"):
        Program.decoded(b"[]")


def test_buckets_check_themselves() -> None:
    with pytest.raises(ProgramError, match="5 tokens for 4 sequences"):
        Bucket(5, 4, 8, 2, decode=True)
    with pytest.raises(ProgramError, match="blocks=0"):
        Bucket(4, 4, 8, 0)
    assert Bucket(16, 16, 100, 64, decode=True).name == "decode_t16_b16_p64_lora"
    assert Bucket(16, 3, 100, 64, lora=False).name == "mixed_t16_b3_p64_base"


def test_the_cache_keeps_programs_and_ignores_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ProgramCache(CacheFolder(tmp_path / "cache", LIMIT), {}, CompileOptions(), ())
    bucket = Bucket(4, 4, 8, 2, decode=True)
    program = dataclasses.replace(small(), bucket=bucket)
    assert cache.load(bucket) is None
    cache.save(bucket, program)
    assert cache.load(bucket) == program
    (path,) = (tmp_path / "cache").iterdir()
    assert path.name == cache.name(bucket)
    path.write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert cache.load(bucket) is None
    assert path.name in caplog.text
    cache.save(bucket, program)
    assert cache.load(bucket) == program


def test_the_key_depends_on_everything() -> None:
    config = {"layers": 2, "rope": {"b": 1, "a": 2}}
    base = {
        "versions": {"torch": "2.11"},
        "config": config,
        "options": CompileOptions(),
        "passes": ["normalize"],
        "bucket": BUCKET,
    }
    others = [
        {"versions": {"torch": "2.13"}},
        {"config": {"layers": 3}},
        {"options": CompileOptions(hadamard=False)},
        {"passes": []},
        {"bucket": None},
        {"bucket": dataclasses.replace(BUCKET, lora=False)},
    ]
    keys = [program_key(**{**base, **change}) for change in ({}, *others)]  # type: ignore[arg-type]
    assert len(set(keys)) == len(keys) and all(len(key) == 64 for key in keys)
    assert keys[0] == program_key(**{**base, "config": {"rope": {"a": 2, "b": 1}, "layers": 2}})  # type: ignore[arg-type]
