"""Programs kept between runs: what is taken out equals what was put in, whatever the number of pages; a change of
anything misses.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sidestream.compiler.api import CompiledModel, compile_model
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.pipeline import pass_names
from sidestream.compiler.program.cache import ProgramCache, ProgramStore, cache_directory, with_pages
from sidestream.compiler.program.program import Bucket
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from support.meta import FIELDS

BUCKET = Bucket(4, 4, 30, 2, decode=True)


def compiled(directory: Path, options: CompileOptions | None = None, **config: object) -> CompiledModel:
    options = options or CompileOptions()
    model = Llama(LlamaConfig.from_dict(FIELDS), LoraShape(2, 16), torch.bfloat16, "meta")
    return compile_model(
        model, options, cache=ProgramCache(ProgramStore(directory), {**FIELDS, **config}, options, pass_names())
    )


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


@pytest.mark.parametrize("change", ["option", "config", "bucket", "damage"])
def test_what_differs_is_made_anew(tmp_path: Path, change: str) -> None:
    program = compiled(tmp_path).program(BUCKET)
    if change == "damage":
        for path in tmp_path.glob("*.json"):
            path.write_text(path.read_text()[:1000])
    model = compiled(
        tmp_path,
        CompileOptions(hadamard=False) if change == "option" else None,
        **({"rope_theta": 5e5} if change == "config" else {}),
    )
    again = model.program(replace(BUCKET, tokens=2, sequences=2) if change == "bucket" else BUCKET)
    assert captured(model)
    assert (again == program) is (change in ("config", "damage"))


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
