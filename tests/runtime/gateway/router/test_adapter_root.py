"""Adapter roots of a fleet: directories and object stores whose adapters appear, change and disappear."""

import os
import shutil

import fsspec
import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.gateway.router import adapter_root
from sidestream.runtime.gateway.router.adapter_root import AdapterRoot


@pytest.fixture
def objects():
    """A store without directories, as S3 is one: keys and bytes."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


def test_objects_of_a_store_come_change_and_go(objects):
    root = AdapterRoot("memory://bucket/adapters")
    assert root.scan() == {}
    pirate, shout = DEMO_MODEL / "adapters" / "pirate", DEMO_MODEL / "adapters" / "shout"
    objects.put(str(pirate), "/bucket/adapters/pirate", recursive=True)
    found = root.scan()
    assert list(found) == ["pirate"] and found["pirate"].rank > 0 and root.scan() == found
    assert found["pirate"].path == "memory://bucket/adapters/pirate" == root.find("pirate")
    objects.put(str(shout / adapter_root.WEIGHTS), f"/bucket/adapters/pirate/{adapter_root.WEIGHTS}")
    changed = root.scan()["pirate"]
    assert changed.version != found["pirate"].version
    objects.rm("/bucket/adapters/pirate", recursive=True)
    assert root.scan() == {} and root.find("pirate") is None


def test_a_store_with_versions(objects, monkeypatch):
    """s3fs reads a version of an object: its parameter stands where other file systems have the first byte."""
    plain = type(objects).cat_file

    def of_version(self, path, version_id=None, start=None, end=None, **more):
        assert version_id is None
        return plain(self, path, start=start, end=end, **more)

    monkeypatch.setattr(type(objects), "cat_file", of_version)
    objects.put(str(DEMO_MODEL / "adapters" / "pirate"), "/bucket/adapters/pirate", recursive=True)
    assert list(AdapterRoot("memory://bucket/adapters").scan()) == ["pirate"]


def test_hostile_objects_of_a_store_are_no_adapters(objects, monkeypatch):
    def put(folder, config=b'{"r": 8}', weights=b"weights"):
        objects.pipe_file(f"/bucket/adapters/{folder}/{adapter_root.CONFIG}", config)
        objects.pipe_file(f"/bucket/adapters/{folder}/{adapter_root.WEIGHTS}", weights)

    for name in (".hidden", "two words", "x" * 200, "deep/inside", "-option", "new\nline"):
        put(name)
    for key in ("/bucket/adapters/../up", "/bucket/adapters/..", "/bucket/elsewhere", "/bucket/adapters"):
        for file in (adapter_root.CONFIG, adapter_root.WEIGHTS):
            objects.store[f"{key}/{file}"] = objects.store[f"/bucket/adapters/.hidden/{file}"]
    put("empty", weights=b"")
    put("huge", config=b" " * (adapter_root.MAX_CONFIG_BYTES + 1))
    root = AdapterRoot("memory://bucket/adapters")
    assert root.scan() == {}
    nested = b"[" * 100_000
    put("nested", config=nested)
    put("lies", config=b'{"r": "8"}')
    put("bytes", config=b"\xff\xfe")
    found = root.scan()
    assert sorted(found) == ["bytes", "lies", "nested"] and {offer.rank for offer in found.values()} == {0}

    def broken(self, *given, **named):
        raise RuntimeError("no credentials")

    monkeypatch.setattr(type(objects), "find", broken)
    with pytest.raises(OSError, match="memory://bucket/adapters: RuntimeError: no credentials"):
        root.scan()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_folders_of_a_root_come_change_and_go(tmp_path, scheme):
    place = tmp_path / "root"
    place.mkdir()
    root = AdapterRoot(f"{scheme}{place}")
    assert root.scan() == {}
    shutil.copytree(DEMO_MODEL / "adapters" / "pirate", place / "pirate")
    (place / ".hidden").mkdir()
    (place / "empty").mkdir()
    (place / "file").write_text("x")
    found = root.scan()
    assert list(found) == ["pirate"] and found["pirate"].rank > 0
    assert found["pirate"].path == f"{scheme}{place}/pirate" == root.find("pirate")
    assert root.scan() == found
    weights = place / "pirate" / "adapter_model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert root.scan()["pirate"].version != found["pirate"].version
    shutil.rmtree(place / "pirate")
    assert root.scan() == {}


@pytest.mark.parametrize("scheme", ["file://", "memory://"])
def test_a_chat_template_and_files_of_mlx_belong_to_an_adapter(tmp_path, scheme):
    """A change of the template is a new version."""
    place = tmp_path / "root"
    pirate = shutil.copytree(DEMO_MODEL / "adapters" / "pirate", place / "pirate")
    (pirate / adapter_root.WEIGHTS).rename(pirate / "adapters.safetensors")
    (pirate / adapter_root.CONFIG).write_text('{"lora_parameters": {"rank": 4, "scale": 2.0}}')
    files = fsspec.filesystem(scheme.removesuffix("://"))
    root = AdapterRoot(f"{scheme}{place}")
    versions = []
    for text in ("one", "two!"):
        (pirate / "chat_template.jinja").write_text(text)
        if scheme == "memory://":
            files.put(f"{place}/", f"{place}/", recursive=True)
        offer = root.scan()["pirate"]
        assert offer.rank == 4
        versions.append(offer.version)
    assert versions[0] != versions[1]
    if scheme == "memory://":
        files.rm(str(place), recursive=True)
