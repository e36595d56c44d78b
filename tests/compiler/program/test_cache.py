"""Programs kept between runs: what is taken out equals what was put in, whatever the number of pages; a change of
anything misses.
"""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sidestream.compiler.api import CompiledModel, compile_model
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.pipeline import pass_names
from sidestream.compiler.program.buffers import ProgramError
from sidestream.compiler.program.cache import LIMIT, ProgramCache, with_pages
from sidestream.compiler.program.cache_folder import CacheFolder, cache_directory
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from support.meta import FIELDS

BUCKET = Bucket(4, 4, 30, 2, decode=True)


def cache(directory: Path, options: CompileOptions, **config: object) -> ProgramCache:
    return ProgramCache(CacheFolder(directory, LIMIT), {**FIELDS, **config}, options, pass_names())


def compiled(directory: Path, options: CompileOptions | None = None, **config: object) -> CompiledModel:
    options = options or CompileOptions()
    model = Llama(LlamaConfig.from_dict(FIELDS), LoraShape(2, 16), torch.bfloat16, "meta")
    return compile_model(model, options, cache=cache(directory, options, **config))


def captured(model: CompiledModel) -> bool:
    return "_optimized" in vars(model)


def test_a_second_start_captures_nothing(tmp_path: Path) -> None:
    first = compiled(tmp_path)
    program = first.program(BUCKET)
    assert captured(first)
    second = compiled(tmp_path)
    assert second.program(BUCKET) == program and not captured(second)
    other = replace(BUCKET, pages=77)
    assert second.program(other) == first.program(other) and not captured(second)
    assert {buffer.shape[0] for buffer in second.program(other).buffers if buffer.name.startswith("kv_")} == {77}


def test_programs_for_later_are_kept_once_and_not_held(tmp_path: Path) -> None:
    later = [replace(BUCKET, tokens=tokens, decode=False) for tokens in (8, 16)]
    first = compiled(tmp_path)
    assert first.missing_programs(later) == later
    first.keep(later[0])
    assert first.missing_programs(later) == later[1:] and not first.programs
    second = compiled(tmp_path)
    assert second.missing_programs(later) == later[1:] and not captured(second), "to look for them needs no graph"
    assert second.program(later[0]).bucket == later[0] and not captured(second)


@pytest.mark.parametrize("change", ["option", "config", "bucket", "damage"])
def test_what_differs_is_made_again(tmp_path: Path, change: str) -> None:
    program = compiled(tmp_path).program(BUCKET)
    if change == "damage":
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:1000])
    model = compiled(
        tmp_path,
        CompileOptions(hadamard=False) if change == "option" else None,
        **({"rope_theta": 5e5} if change == "config" else {}),
    )
    again = model.program(replace(BUCKET, tokens=2, sequences=2) if change == "bucket" else BUCKET)
    assert captured(model)
    assert (again == program) is (change in ("config", "damage"))


@pytest.mark.parametrize("damage", ["constant", "name", "digest", "format", "empty", "another file"])
def test_a_kept_program_is_believed_as_a_whole(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A constant that was changed on the disk changed every answer in silence."""
    other = replace(BUCKET, tokens=2, sequences=2)
    first = compiled(tmp_path)
    programs = {bucket: first.program(bucket) for bucket in (BUCKET, other)}
    files = sorted(tmp_path.iterdir())
    contents = [file.read_bytes() for file in files]
    for file, content, others in zip(files, contents, reversed(contents), strict=True):
        head, _, body = content.partition(b"\n")
        changed = {
            "constant": head + b"\n" + body.replace(b"1e-0", b"3e-0", 1),
            "name": others,
            "digest": head[:-1] + bytes([head[-1] ^ 1]) + b"\n" + body,
            "format": head.replace(b"kept-1", b"kept-2") + b"\n" + body,
            "empty": b"",
            "another file": body,
        }[damage]
        assert changed != content
        file.write_bytes(changed)
    again = compiled(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert {bucket: again.program(bucket) for bucket in programs} == programs
    assert captured(again) and [file.read_bytes() for file in files] == contents
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2 and all("its digest is wrong" in line for line in said)


def test_what_others_may_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "programs"
    program = compiled(folder).program(BUCKET)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
    folder.chmod(0o777)
    again = compiled(folder)
    assert again.program(BUCKET) == program and captured(again) and "others may write" in caplog.text


def tensors_of(program: Program) -> dict[str, torch.Tensor]:
    return {
        buffer.name: torch.zeros(buffer.shape, dtype=buffer.dtype)
        for buffer in program.buffers
        if buffer.kind != "temp"
    }


def test_a_kept_program_that_cannot_be_bound_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its digest is right and its content is not: a fault of its writer."""
    program = compiled(tmp_path).program(BUCKET)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    steps = (replace(program.steps[0], op="sidestream.nothing"), *program.steps[1:])
    buffers = tuple(replace(each, dtype=torch.float64) if each.kind == "input" else each for each in program.buffers)
    for bad in (replace(program, steps=steps), replace(program, buffers=buffers)):
        cache(tmp_path, CompileOptions()).save(BUCKET, bad)
        model = compiled(tmp_path)
        assert model.bind(BUCKET, tensors_of(program)).program == program and captured(model)
        assert path.read_bytes() == content and "cannot be bound and is built again" in caplog.text
        caplog.clear()
    with pytest.raises(ProgramError, match="no tensor is given"):
        compiled(tmp_path).bind(BUCKET, {})


def test_a_disk_that_takes_nothing_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    program = compiled(tmp_path / "file").program(BUCKET)
    assert program.bucket == BUCKET and "not kept" in caplog.text


def test_pages_are_put_in_and_taken_out(tmp_path: Path) -> None:
    program = compiled(tmp_path).program(BUCKET)
    assert with_pages(with_pages(program, 1), 30) == program


def test_the_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("SIDESTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "sidestream"
