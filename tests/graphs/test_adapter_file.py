"""An adapter's file as it is read: the same tensors as safetensors finds, one hash of all bytes, and no file that
lies about itself.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.graphs.files import adapter_file
from sidestream.graphs.files.adapter_file import AdapterFile
from sidestream.graphs.files.safetensors_file import in_range
from sidestream.graphs.files.safetensors_header import read_layout


class Fault(ValueError):
    """What these tests have raised."""


def opened(path: Path) -> AdapterFile:
    return AdapterFile(path, Fault, "do this", read_layout(path, Fault, "do this", 8, foreign="use another"))


def written(path: Path, header: Any, data: bytes, pad: int = 0) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("piece", [100, 4096, 1 << 24])
@pytest.mark.parametrize(
    "kinds", [[torch.bfloat16], [torch.float16, torch.float32, torch.bfloat16]], ids=["one", "mixed"]
)
def test_reads_what_safetensors_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[torch.dtype], piece: int
) -> None:
    monkeypatch.setattr(adapter_file, "PIECE", piece)
    path = tmp_path / "a.safetensors"
    save_file(
        {f"t{index}": torch.randn(index, 33).to(kinds[index % len(kinds)]) for index in range(7)},
        path,
        metadata={"format": "pt"},
    )
    digests = set()
    for change in (None, 0, -1):
        if change is not None:
            content = bytearray(path.read_bytes())
            place = content.index(b"pt") if change == 0 else change
            content[place] ^= 1
            path.write_bytes(content)
        with opened(path) as file:
            file.read()
        file.check_values()
        stored = load_file(path)
        assert set(read_layout(path, Fault, "do this", 8, foreign="use another").places) == set(stored)
        for name, tensor in stored.items():
            assert file.tensor(name).dtype == tensor.dtype and torch.equal(file.tensor(name), tensor)
        digests.add(file.digest)
    assert len(digests) == 3, "of every byte"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_value_that_is_out_of_range_is_seen(dtype: torch.dtype) -> None:
    if dtype.itemsize == 2:
        patterns = np.arange(1 << 16, dtype=np.uint16)
    else:
        top = np.arange(1 << 16, dtype=np.uint32) << 16
        patterns = np.concatenate([top, top | 1, top | 0xFFFF])
    values = torch.from_numpy(patterns.view(np.int16 if dtype.itemsize == 2 else np.int32)).view(dtype)
    good = (values.float().abs() < 65536).numpy()
    assert in_range(patterns[good].view(np.uint8), dtype) and in_range(patterns[:0].view(np.uint8), dtype)
    for pattern in patterns[~good][::97]:
        for place in (0, 7, -1):
            some = patterns[good][:999].copy()
            some[place] = pattern
            assert not in_range(some.view(np.uint8), dtype), hex(pattern)


@pytest.mark.parametrize("pad", range(4))
def test_data_at_any_place(tmp_path: Path, pad: int) -> None:
    values = torch.randn(5, 7)
    header = {"x": {"dtype": "F32", "shape": [5, 7], "data_offsets": [0, 140]}}
    with opened(written(tmp_path / "a", header, values.numpy().tobytes(), pad)) as file:
        file.read()
    file.check_values()
    assert torch.equal(file.tensor("x"), values)
    values[4, 6] = torch.nan
    with opened(written(tmp_path / "a", header, values.numpy().tobytes(), pad)) as file:
        file.read()
    with pytest.raises(Fault, match="tensor 'x' has NaN"):
        file.check_values()


def entry(first: int, last: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        {"x": 1},
        {"x": {}},
        {"x": entry(0, 7)},
        {"x": entry(0, 8), "y": entry(4, 12)},
        {"x": entry(0, 8), "y": entry(9, 17)},
        {"x": entry(8, 16)},
        {"x": entry(0, 8)},
        {"x": entry(0, 8), "y": entry(8, 24)},
        {"x": entry(-8, 0)},
        {"x": entry(0, 16, shape=(-2, -2))},
        {"x": entry(0, 16, shape="22")},
        {"x": entry(0, 16, shape=(2.0, 2.0))},
        {"x": entry(0, 16, shape=(True, 4))},
        {"x": entry(0, 16, shape=None)},
        {"x": {"dtype": "F32", "shape": [4], "data_offsets": [16]}},
        {"x": {"dtype": "F32", "shape": [4], "data_offsets": "ab"}},
        {"x": entry(16, 0, dtype="I8"), "y": entry(0, 16, dtype="I8")},
    ],
    ids=lambda header: str(header)[:60],
)
def test_headers_that_lie(tmp_path: Path, header: Any) -> None:
    with pytest.raises(Fault, match=r"a is damaged or truncated \(.*\): do this"):
        opened(written(tmp_path / "a", header, bytes(16)))


def test_a_header_longer_than_its_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(Fault, match="damaged or truncated"):
        opened(tmp_path / "a")
    with pytest.raises(Fault, match="not a regular file"):
        opened(tmp_path)
    with pytest.raises(Fault, match=r"nothing is missing from .*: do this"):
        opened(tmp_path / "nothing")


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a"
    header = {"x": entry(0, 8)}
    with opened(written(path, header, bytes(8))) as file:
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(Fault, match="became shorter"):
            file.read()
    layout = read_layout(written(path, header, bytes(8)), Fault, "do this", 8, foreign="use another")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(Fault, match="changed while it was read"):
        AdapterFile(path, Fault, "do this", layout)
    with opened(written(path, header, bytes(8))) as file:
        path.write_bytes(path.read_bytes().replace(b"x", b"y"))
        with pytest.raises(Fault, match="changed while it was read"):
            file.read()
