"""The disk cache of packed adapters: a hit has the bytes of a miss and reads no tensors; damaged files are absent."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.compiler.graph.recipe import Recipe, cat, item, param, quantize
from sidestream.compiler.options import OptionError
from sidestream.compiler.program import cache_folder
from sidestream.compiler.program.cache_folder import CacheFolder
from sidestream.graphs.adapter import AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.lora import LoraShape
from sidestream.graphs.model_directory import WEIGHTS
from sidestream.runtime.adapters import disk_cache
from sidestream.runtime.adapters import registry as adapters
from sidestream.runtime.adapters.background_jobs import BackgroundJobs, JobCancelled
from sidestream.runtime.adapters.disk_cache import AdapterDiskCache, packing_key
from sidestream.runtime.adapters.host_store import HostStore
from sidestream.runtime.adapters.registry import AdapterRegistry
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama

PREFIX = "model.layers.0.self_attn."
LORA = LoraShape(3, 16)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def paths(base):
    return tiny_adapters(base, [AdapterSpec(rank=4 + index, alpha=24) for index in range(3)])


@pytest.fixture(scope="module")
def config(base):
    return LlamaConfig.from_directory(base.path)


@pytest.fixture(autouse=True)
def few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces in small blocks."""
    monkeypatch.setattr(disk_cache, "WRITE_BYTES", 8192)
    monkeypatch.setattr(disk_cache, "MAX_CHUNK_BYTES", 1 << 15)


def new_cache(folder: Path, limit: int = 1 << 30) -> AdapterDiskCache:
    return AdapterDiskCache(CacheFolder(folder / "adapters", limit))


def new_recipes(dtype: torch.dtype = torch.int8) -> dict[str, Recipe]:
    down = quantize(param("model.layers.0.mlp.down_proj.lora_a"), dtype)
    return {
        "qkv_a": cat(1, [param(f"{PREFIX}{name}_proj.lora_a") for name in "qkv"]),
        "down_a": item(down, 0),
        "down_a_scale": item(down, 1),
    }


def new_store(
    config: LlamaConfig, registry: AdapterRegistry, recipes: dict[str, Recipe] | None = None, keep: int = 2
) -> HostStore:
    recipes = recipes or new_recipes()
    stacks = {
        "qkv_a": torch.zeros(3, 48, 128, dtype=torch.bfloat16),
        "down_a": torch.zeros(3, 16, 256, dtype=torch.int8),
        "down_a_scale": torch.zeros(3, 16),
    }
    return HostStore(recipes, stacks, registry, LORA, keep, threading.Lock())


def start(config: LlamaConfig, path: Path, folder: Path, **more: Any) -> tuple[bytes, bool]:
    """A start with one adapter, ended once everything is kept: (its block's bytes, whether its tensors were read for
    them).
    """
    registry = AdapterRegistry(config, 16, disk_cache=new_cache(folder))
    number = registry.add("a", path).number
    store, reads = new_store(config, registry, **more), []
    read = registry.read
    registry.read = lambda number: reads.append(number) or read(number)
    block = store.prepare(number)
    found = block.bytes.tobytes()
    store.release(block)
    assert registry.disk_cache.jobs.flush(20)
    return found, bool(reads)


def kept(folder: Path, kind: str = "slot") -> list[Path]:
    return sorted((folder / "adapters").glob(f"*.{kind}"))


def test_a_hit_has_the_bytes_of_a_miss_and_reads_no_tensors(config, paths, tmp_path, monkeypatch):
    alone = AdapterRegistry(config, 16)
    number = alone.add("a", paths[0]).number
    expected = new_store(config, alone).prepare(number).bytes.tobytes()
    assert start(config, paths[0], tmp_path) == (expected, True)
    assert len(kept(tmp_path)) == 1 and len(kept(tmp_path, "hash")) == 1
    folder = tmp_path / "adapters"
    assert folder.stat().st_mode & 0o777 == 0o700 and {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        0o600
    }
    monkeypatch.setattr(
        "sidestream.graphs.files.adapter_file.in_range", lambda *_: pytest.fail("the values were looked at again")
    )
    assert start(config, paths[0], tmp_path) == (expected, False)
    registry = AdapterRegistry(config, 16, disk_cache=new_cache(tmp_path))
    known = registry.add("a", paths[0])
    assert known.content_hash == alone.hashes[number] and (known.adapter.rank, known.adapter.scaling) == (
        4,
        alone.by_number(number).adapter.scaling,
    )


def test_a_cold_start_within_one_process(config, paths, tmp_path):
    """Given up and wanted again, an adapter comes from the cache as long as its files look the same; else they
    decide, with the errors they always had.
    """
    copy = shutil.copytree(paths[0], tmp_path / "copy")
    registry = AdapterRegistry(config, 16, disk_cache=new_cache(tmp_path), keep=0)
    number = registry.add("a", copy).number
    store, calls, load = new_store(config, registry), [], adapters.load_adapter

    def cold() -> bytes:
        store.drop(number)
        block = store.prepare(number)
        store.release(block)
        assert registry.disk_cache.jobs.flush(20)
        return block.bytes.tobytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "load_adapter", lambda *args, **more: calls.append(args) or load(*args, **more))
        first = cold()
        assert len(calls) == 1 and cold() == first and len(calls) == 1
        os.utime(copy / WEIGHTS)
        assert cold() == first and len(calls) == 2, "looked at again,"
        assert cold() == first and len(calls) == 2, "once"
    shutil.copy(paths[1] / WEIGHTS, copy / WEIGHTS)
    shutil.copy(paths[1] / "adapter_config.json", copy / "adapter_config.json")
    with pytest.raises(AdapterError, match="have changed since it was registered"):
        cold()
    shutil.rmtree(copy)
    with pytest.raises(AdapterError, match="does not exist"):
        cold()


@pytest.mark.parametrize("change", ["content", "scaling", "recipes", "sources"])
def test_what_differs_is_packed_again(config, paths, tmp_path, change, monkeypatch):
    copy = shutil.copytree(paths[0], tmp_path / "copy")
    first, _ = start(config, copy, tmp_path)
    more: dict[str, Any] = {}
    if change == "content":
        tensors = load_file(copy / WEIGHTS)
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, copy / WEIGHTS)
    elif change == "scaling":
        config_file = copy / "adapter_config.json"
        config_file.write_text(config_file.read_text().replace('"lora_alpha": 24', '"lora_alpha": 25'))
    elif change == "recipes":
        more["recipes"] = new_recipes() | {"qkv_a": cat(1, [param(f"{PREFIX}{name}_proj.lora_a") for name in "kqv"])}
    else:
        monkeypatch.setattr(disk_cache, "_sources", lambda: "of another release")
    again, read = start(config, copy, tmp_path, **more)
    # no B in these recipes
    assert read and len(kept(tmp_path)) == 2 and (again == first) is (change in ("sources", "scaling"))
    assert start(config, copy, tmp_path, **more) == (again, False)


def test_the_key_knows_shapes_and_dtypes_and_no_slot_count(config):
    shapes = [((16, 256), torch.int8)]
    recipes = {"a": new_recipes()["down_a"]}
    constants = {"signs": torch.ones(4)}
    key = packing_key(recipes, shapes, torch.bfloat16, config, LORA, constants)
    assert key == packing_key(dict(recipes), list(shapes), torch.bfloat16, config, LoraShape(77, 16), constants)
    others = {
        packing_key(recipes, [other], torch.bfloat16, config, LORA, constants)
        for other in (((16, 256), torch.uint8), ((8, 512), torch.int8))
    }
    others |= {
        packing_key(recipes, shapes, torch.float32, config, LORA, constants),
        packing_key({"b": recipes["a"]}, shapes, torch.bfloat16, config, LORA, constants),
        packing_key(recipes, shapes, torch.bfloat16, config, LORA, {"signs": -torch.ones(4)}),
        packing_key(recipes, shapes, torch.bfloat16, config, LoraShape(3, 32), constants),
    }
    assert len({key, *others}) == 7


@pytest.mark.parametrize("damage", ["bit", "last bit", "short", "long", "empty", "header", "another's", "garbage"])
def test_a_damaged_slot_is_replaced(config, paths, tmp_path, damage, caplog):
    first, _ = start(config, paths[0], tmp_path)
    (path,) = kept(tmp_path)
    good = path.read_bytes()
    bad = bytearray(good)
    if damage == "bit":
        bad[6000] ^= 1
    elif damage == "last bit":
        bad[-1] ^= 0x80
    elif damage == "another's":
        bad[:4096] = good[:4096].replace(path.stem[:8].encode(), b"00000000")
    elif damage == "header":
        bad[:200] = b"[" * 200
    bad = bytearray(
        {"short": good[:-1], "long": good + b"\0", "empty": b"", "garbage": os.urandom(len(good))}.get(
            damage, bytes(bad)
        )
    )
    path.write_bytes(bad)
    with caplog.at_level(logging.WARNING):
        assert start(config, paths[0], tmp_path) == (first, True)
    assert "a damaged cache file" in caplog.text and path.read_bytes() == good
    assert start(config, paths[0], tmp_path) == (first, False)


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 100, None])
def test_a_damaged_content_hash_is_replaced(config, paths, tmp_path, content):
    first, _ = start(config, paths[0], tmp_path)
    (path,) = kept(tmp_path, "hash")
    good = path.read_bytes()
    path.write_bytes(good[:-1] if content is None else content)
    assert start(config, paths[0], tmp_path) == (first, False), "the slot is still good"
    assert path.read_bytes() == good


@pytest.mark.parametrize("attack", ["digit", "rotated", "renamed", "another format"])
def test_kept_content_hashes_are_believed_as_a_whole(config, paths, tmp_path, attack, caplog):
    """One changed digit made an adapter unservable for good; exchanged ones served another adapter's weights."""
    good = [start(config, path, tmp_path)[0] for path in paths]
    files = kept(tmp_path, "hash")
    contents = [file.read_bytes() for file in files]
    damaged = list(contents)
    if attack == "digit":
        damaged = [content[:-1] + (b"0" if content[-1:] != b"0" else b"1") for content in contents]
    elif attack == "rotated":
        damaged = [
            content[:-64] + other[-64:] for content, other in zip(contents, contents[1:] + contents[:1], strict=True)
        ]
    elif attack == "renamed":
        damaged = contents[1:] + contents[:1]
    else:
        damaged = [content.replace(b"kept-1", b"kept-0") for content in contents]
    for file, content in zip(files, damaged, strict=True):
        file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert [start(config, path, tmp_path)[0] for path in paths] == good
    assert len(caplog.records) == 3 and all("digest is wrong" in record.message for record in caplog.records)
    assert [file.read_bytes() for file in files] == contents


def test_slots_under_each_other_s_names_are_packed_again(config, paths, tmp_path, caplog):
    good = [start(config, path, tmp_path)[0] for path in paths]
    files = kept(tmp_path)
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)
    assert [start(config, path, tmp_path)[0] for path in paths] == good and len(caplog.records) == 3
    assert [file.read_bytes() for file in files] == contents


def test_a_wrong_hash_with_a_right_digest_is_wrong_once(config, paths, tmp_path):
    """The adapter cannot be served with it, and can when it is registered again."""
    good, _ = start(config, paths[0], tmp_path)
    (file,) = kept(tmp_path, "hash")
    folder = CacheFolder(tmp_path / "adapters", 1 << 30)
    folder.keep(file.name, b"0" * 64)
    with pytest.raises(AdapterError, match="register it again"):
        start(config, paths[0], tmp_path)
    assert start(config, paths[0], tmp_path)[0] == good
    folder.keep(file.name, b"\xff" * 64)
    assert start(config, paths[0], tmp_path)[0] == good


def test_what_others_could_have_written_is_not_used(config, paths, tmp_path, caplog):
    first, _ = start(config, paths[0], tmp_path)
    (path,) = kept(tmp_path)
    path.chmod(0o666)
    assert start(config, paths[0], tmp_path) == (first, True)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert start(config, paths[0], tmp_path) == (first, True)
    assert not path.is_symlink() and start(config, paths[0], tmp_path) == (first, False)
    (tmp_path / "adapters").chmod(0o777)
    assert start(config, paths[0], tmp_path) == (first, True)
    assert "others may write" in caplog.text


@pytest.mark.parametrize("fault", ["in the way", "full", "full on the way"])
def test_a_disk_that_takes_nothing_costs_only_time(config, paths, tmp_path, fault, monkeypatch, caplog):
    if fault == "in the way":
        (tmp_path / "adapters").write_text("a file")
    elif fault == "full":
        monkeypatch.setattr(cache_folder.os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096))
    else:

        def write(handle: int, data: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(disk_cache, "write_fully", write)
        monkeypatch.setattr(cache_folder, "write_fully", write)
    for _ in range(2):
        assert start(config, paths[0], tmp_path)[1]
    assert "not kept" in caplog.text and (fault == "in the way" or not list((tmp_path / "adapters").iterdir()))


def test_the_longest_unused_are_removed(tmp_path):
    cache = new_cache(tmp_path, limit=3 * (4096 + 8192) + 100)
    data = {name: np.random.default_rng(index).integers(0, 256, 8192, np.uint8) for index, name in enumerate("abcd")}
    for age, name in enumerate("abc"):
        cache.save(name, data[name])
        os.utime(kept(tmp_path)[-1], (1e9 + age, 1e9 + age))
    for name, age in (("gone", 7200), ("busy", 60)):
        path = tmp_path / "adapters" / f"{name}.tmp"
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
    target = np.empty(8192, np.uint8)
    assert cache.load("a", target) and np.array_equal(target, data["a"])  # used: `b` is the oldest now
    cache.save("d", data["d"])
    assert [path.stem for path in kept(tmp_path)] == ["a", "c", "d"] and [
        path.stem for path in kept(tmp_path, "tmp")
    ] == ["busy"]
    assert not cache.load("b", target) and cache.load("d", target) and np.array_equal(target, data["d"])
    cache.save("large", np.zeros(1 << 20, np.uint8))
    assert [path.stem for path in kept(tmp_path)] == ["a", "c", "d"], (
        "larger than all: not kept, and nothing given up for it"
    )


def test_writers_at_once(tmp_path):
    """A reader finds nothing or all of it meanwhile."""
    data = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    caches, enough = [new_cache(tmp_path) for _ in range(4)], threading.Event()

    def write(cache):
        while not enough.is_set():
            cache.save("k", data)

    writers = [threading.Thread(target=write, args=(cache,)) for cache in caches]
    for writer in writers:
        writer.start()
    found, end = 0, time.monotonic() + 60
    while found < 5 and time.monotonic() < end:
        target = np.zeros_like(data)
        if caches[0].has("k"):
            assert caches[0].load("k", target) and np.array_equal(target, data)
            found += 1
    enough.set()
    for writer in writers:
        writer.join()
    assert found == 5 and [path.name for path in (tmp_path / "adapters").iterdir()] == ["k.slot"]


def test_writing_can_be_given_up(tmp_path):
    cache, stopped = new_cache(tmp_path), threading.Event()
    stopped.set()
    with pytest.raises(JobCancelled):
        cache.save("k", np.zeros(300_000, np.uint8), stopped)
    assert not list((tmp_path / "adapters").iterdir())


def test_a_process_that_ends_leaves_no_half_written_file(tmp_path):
    code = f"""
import sys, time, numpy
from pathlib import Path
from sidestream.runtime.adapters import disk_cache
from sidestream.compiler.program.cache_folder import CacheFolder
disk_cache.WRITE_PAUSE = 0.05
cache = disk_cache.AdapterDiskCache(CacheFolder(Path({str(tmp_path)!r}) / "adapters", 1 << 40))
cache.jobs._queue.idle_seconds = 0.0
cache.jobs.submit(lambda stopped: cache.save("k", numpy.zeros(1 << 29, numpy.uint8), stopped))
while not list(Path({str(tmp_path)!r}).glob("adapters/*.tmp")):
    time.sleep(0.01)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert not list((tmp_path / "adapters").iterdir())


def test_work_waits_for_quiet_and_ends_with_its_owner():
    background = BackgroundJobs("test", idle_seconds=0.3)
    done: list[Any] = []
    line = background._queue
    background.submit(lambda stopped: done.append(time.monotonic() - line.last_activity))
    for _ in range(5):
        time.sleep(0.1)
        background.postpone()
    background.submit(lambda stopped: 1 / 0)  # logged, and no reason to end
    background.submit(lambda stopped: done.append("last"))
    until = time.monotonic() + 60
    while len(done) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert done[0] >= 0.3 and done[1] == "last" and background.flush(60.0)
    thread = background._thread
    assert thread is not None
    background.submit(lambda stopped: done.append("never"))
    del background
    thread.join(60)
    assert not thread.is_alive() and "never" not in done


def test_size_and_place_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path))
    monkeypatch.delenv(disk_cache.SIZE_VARIABLE, raising=False)
    usual = AdapterDiskCache.from_environment()
    assert usual is not None and usual.folder.directory == tmp_path / "adapters" and usual.folder.limit == 32 * 10**9
    monkeypatch.setenv(disk_cache.SIZE_VARIABLE, "0.5")
    smaller = AdapterDiskCache.from_environment()
    assert smaller is not None and smaller.folder.limit == 5 * 10**8 and not list(tmp_path.iterdir())
    monkeypatch.setenv(disk_cache.SIZE_VARIABLE, "0")
    assert AdapterDiskCache.from_environment() is None
    for bad in ("much", "-1", "nan", "inf"):
        monkeypatch.setenv(disk_cache.SIZE_VARIABLE, bad)
        with pytest.raises(OptionError, match=disk_cache.SIZE_VARIABLE):
            AdapterDiskCache.from_environment()
