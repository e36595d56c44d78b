"""What changed between two dumps."""

import json
from pathlib import Path

import pytest
from sidestream.compiler.inspect.compare_dumps import DumpError, as_text, difference, read_dump
from sidestream.compiler.options import CompileOptions
from support.meta_model import DECODE, MIXED, compiled_llama

WITHOUT = CompileOptions(kv_dtype="bf16", disable=("pack_projections",))


def test_two_dumps_of_one_compilation_are_the_same(tmp_path: Path) -> None:
    for name in "ab":
        compiled_llama().dump(tmp_path / name, [DECODE, MIXED])
    found = difference(read_dump(tmp_path / "a"), read_dump(tmp_path / "b"))
    assert not any(found.values()) and "same compilation" in as_text(found)


def test_options_passes_kernels_bytes_and_time_are_told(tmp_path: Path) -> None:
    compiled_llama().dump(tmp_path / "a", [DECODE])
    compiled_llama(WITHOUT).dump(tmp_path / "b", [DECODE, MIXED])
    found = difference(read_dump(tmp_path / "a"), read_dump(tmp_path / "b"))
    assert found["options"] == {"disable": [[], ["pack_projections"]], "kv_dtype": ["auto", "bf16"]}
    assert found["passes"]["pack_projections"] == {"only_in": "first"}
    assert (
        found["passes"]["fuse_silu_mul"]["matches"] == [2, 0]
        and len(found["passes"]["fuse_silu_mul"]["rejected"]["new"]) == 2
    )
    assert "normalize" not in found["passes"]
    program = found["programs"][DECODE.name]
    assert all(before < after for before, after in (program[name] for name in ("kernels", "bytes", "estimated_us")))
    assert sum(program["kernels_changed"].values()) == program["kernels"][1] - program["kernels"][0]
    assert found["programs"][MIXED.name] == {"only_in": "second"}
    assert json.dumps(found)
    text = as_text(found)
    assert "pack_projections: only in the first dump" in text and f"{MIXED.name}: only in the second dump" in text
    assert "newly refused: silu" in text and "2 -> 0 matches" in text and "estimated us" in text


def test_a_version_that_changed_is_told(tmp_path: Path) -> None:
    compiled_llama().dump(tmp_path / "a", [DECODE])
    first = read_dump(tmp_path / "a")
    content = json.loads((tmp_path / "a" / "summary.json").read_text())
    (tmp_path / "a" / "summary.json").write_text(json.dumps({**content, "version": "9.9"}))
    assert difference(first, read_dump(tmp_path / "a"))["version"] == [first.version, "9.9"]


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="contains no dump"):
        read_dump(tmp_path)
    for damaged in ("{", "[]", '{"version": "1", "options": {}, "passes": [{}], "programs": []}'):
        (tmp_path / "summary.json").write_text(damaged)
        with pytest.raises(DumpError, match="is not a valid summary"):
            read_dump(tmp_path)
