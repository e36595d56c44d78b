"""Adapters as an attacker would write them: each is refused by name, and its error tells nothing of its target."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sidestream.graphs.adapter import Adapter, load_adapter
from sidestream.graphs.adapter_config import CONFIG, AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.files import safetensors_header as tensor_layout
from sidestream.graphs.files.safetensors_header import read_layout
from sidestream.graphs.files.untrusted_files import FileRefusedError, open_regular
from sidestream.graphs.model_directory import WEIGHTS
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

SECRET = "s3cret"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("hostile"))


@pytest.fixture
def adapter(base: TinyBase) -> Path:
    return tiny_adapters(base, [AdapterSpec(rank=8, targets=("q_proj", "down_proj"))])[0]


def load(base: TinyBase, path: Path, roots: list[Path] | None = None) -> Adapter:
    return load_adapter(path, LlamaConfig.from_directory(base.path), 64, roots=roots)


def configure(path: Path, **fields: Any) -> None:
    file = path / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def replaced(path: Path, name: str, target: str | Path) -> None:
    (path / name).unlink()
    (path / name).symlink_to(target)


def with_header(path: Path, header: bytes, data: bytes = b"") -> None:
    (path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_a_regular_expression_stops_nothing(base: TinyBase, adapter: Path) -> None:
    """Only the tensors decide what is served, so a pattern that matches nothing is a difference."""
    configure(adapter, target_modules=".?" * 120 + "Z")
    assert "not targeted" in load(base, adapter).differences[0]
    configure(adapter, target_modules="^(model)(?!.*(lm_head|embed)).*_proj")
    (difference,) = load(base, adapter).differences
    assert "not compared" in difference and "look-ahead" in difference
    configure(adapter, target_modules=["q_proj", "down_proj"], rank_pattern={f"{'.*' * 5}Z{i}": 8 for i in range(2000)})
    with pytest.raises(AdapterError, match="rank_pattern has 2000 patterns"):
        load(base, adapter)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("kind", ["endless", "terminal", "fifo", "link to a fifo", "directory", "loop", "socket"])
def test_only_regular_files_are_opened(base: TinyBase, adapter: Path, name: str, kind: str, tmp_path: Path) -> None:
    """A pipe that nobody writes to would block the thread that loads adapters for good."""
    if kind in ("endless", "terminal"):
        replaced(adapter, name, "/dev/zero" if kind == "endless" else "/dev/ptmx")
    elif kind == "link to a fifo":
        os.mkfifo(tmp_path / "pipe")
        replaced(adapter, name, tmp_path / "pipe")
    elif kind == "loop":
        replaced(adapter, name, name)
    else:
        (adapter / name).unlink()
        make = {"fifo": os.mkfifo, "directory": os.mkdir, "socket": lambda path: os.mknod(path, 0o140600)}[kind]
        make(adapter / name)  # type: ignore[operator]
    with pytest.raises(AdapterError, match=rf"{name}.*(is not a regular file|cannot be read)"):
        load(base, adapter)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("there", [True, False])
def test_links_do_not_leave_the_root(base: TinyBase, adapter: Path, name: str, there: bool, tmp_path: Path) -> None:
    """Whether the target exists is not told either."""
    root = tmp_path / "root"
    adapter = adapter.rename(root) if root.mkdir() is not None else adapter.rename(root / "a")
    elsewhere = tmp_path / f"root-{SECRET}"
    if there:
        elsewhere.write_text(json.dumps({"peft_type": "LORA", SECRET: SECRET}))
    replaced(adapter, name, elsewhere)
    with pytest.raises(AdapterError, match=f"{name} is outside the directories") as caught:
        load(base, adapter, [root])
    assert SECRET not in str(caught.value) and str(tmp_path) not in str(caught.value)


def test_links_within_the_root_are_followed(base: TinyBase, adapter: Path, tmp_path: Path) -> None:
    """As a download cache has them."""
    (tmp_path / "blobs").mkdir()
    for name in (CONFIG, WEIGHTS):
        (adapter / name).rename(tmp_path / "blobs" / name)
        (adapter / name).symlink_to(tmp_path / "blobs" / name)
    snapshot = tmp_path / "snapshot"
    adapter.rename(snapshot)
    assert load(base, snapshot, [tmp_path / "nowhere", tmp_path]).rank == 8
    with pytest.raises(AdapterError, match="is outside"):
        load(base, snapshot, [snapshot])


def test_a_directory_that_is_exchanged_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("root", "other"):
        (tmp_path / name / "a").mkdir(parents=True)
        (tmp_path / name / "a" / "x").write_text(name)
    usual = os.open
    swapped: list[bool] = []

    def opening(path: Any, *more: Any, **named: Any) -> int:
        if not swapped and str(path).endswith("x"):
            swapped.append(True)
            (tmp_path / "root" / "a").rename(tmp_path / "root" / "b")
            (tmp_path / "root" / "a").symlink_to(tmp_path / "other" / "a")
        return usual(path, *more, **named)

    monkeypatch.setattr(os, "open", opening)
    with pytest.raises(FileRefusedError, match="is outside"):
        open_regular(tmp_path / "root" / "a" / "x", [tmp_path / "root"])
    assert swapped


def test_headers_are_bounded_before_they_are_read(
    base: TinyBase, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"t{index}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for index in range(2000)}
    monkeypatch.setattr(tensor_layout, "_HEADER_BYTES", 1 << 20)
    with_header(adapter, json.dumps(many).encode())
    with pytest.raises(AdapterError, match=r"has 2000 tensors; at most \d+ are allowed: .*another base"):
        load(base, adapter)
    monkeypatch.undo()
    monkeypatch.setattr(tensor_layout.json, "loads", lambda _: pytest.fail("it was parsed"))
    reasons = (
        r"a header of \d+ bytes; at most \d+ are allowed for 56 tensors: use another",
        r"damaged .*header of \d+",
    )
    for header, reason in zip((json.dumps(many).encode(), b" " * (93 << 20)), reasons, strict=True):
        with_header(adapter, header)
        with pytest.raises(AdapterError, match=reason):
            read_layout(adapter / WEIGHTS, AdapterError, "do this", 56, foreign="use another")


def test_a_large_config_is_not_parsed(base: TinyBase, adapter: Path) -> None:
    configure(adapter, auto_mapping="x" * 300_000)
    with pytest.raises(AdapterError, match="larger than 262144 bytes"):
        load(base, adapter)


def test_impossible_shapes(base: TinyBase, adapter: Path) -> None:
    """Products of huge sizes take quadratic time."""
    for shape in ([1 << 62] * 9, [1] * 9, [1 << 48]):
        with_header(adapter, json.dumps({"t": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode())
        with pytest.raises(AdapterError, match="has invalid sizes"):
            load(base, adapter)


PASSING = [("layers_pattern", "text"), ("alpha_pattern", "key"), ("layers_to_transform", "number")]
FIELDS = (
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules bias task_type "
    "layers_to_transform layers_pattern init_lora_weights use_dora modules_to_save"
)


@pytest.mark.parametrize("field", [*FIELDS.split(), f"unknown {SECRET}"])
@pytest.mark.parametrize("wrap", ["text", "list", "object", "key", "pattern", "number"])
def test_errors_quote_no_values(base: TinyBase, adapter: Path, field: str, wrap: str) -> None:
    value: Any = {
        "text": f"{SECRET} (",
        "list": [[f"{SECRET}"]],
        "object": {"x": SECRET},
        "key": {f"- {SECRET}": -1},
        "pattern": {f"({SECRET}": 8},
        "number": 10**80,
    }[wrap]
    configure(adapter, **{field: value})
    try:
        load(base, adapter)
    except AdapterError as error:
        assert SECRET not in str(error) and "0" * 20 not in str(error) and len(str(error)) < 1000
    else:
        assert (field, wrap) in PASSING


def test_errors_quote_no_weights(base: TinyBase, adapter: Path) -> None:
    for header in (f"{SECRET}", json.dumps({f"- {SECRET}": {"dtype": SECRET, "shape": [], "data_offsets": [0, 0]}})):
        with_header(adapter, header.encode())
        with pytest.raises(AdapterError) as caught:
            load(base, adapter)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["n" * 300, "n" * 5000, "zero\0byte"])
def test_a_path_that_no_directory_can_have(base: TinyBase, tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterError, match=r"cannot be read|does not exist"):
        load(base, tmp_path / name)
