"""The next server at an address has the adapters that clients loaded into the last one."""

import os
import shutil
import time
from pathlib import Path

import pytest
from msgspec import structs
from sidestream.runtime.protocol.adapter_map import AdapterEntry, HybridClock, Stamp
from sidestream.runtime.protocol.messages import Done, Error, ListAdapters, LoadAdapter, UnloadAdapter
from sidestream.runtime.server.saved_adapters import SavedAdapters
from sidestream.runtime.server.settings import ServeSettings
from support.serving import Wire, serve_fake


def contents(wire: Wire) -> dict[str, str]:
    return {info.name: info.content for info in wire.call(ListAdapters(9)).adapters}


def test_loaded_adapters_are_there_after_a_restart_of_the_server(tmp_path: Path) -> None:
    for name in ("late", "gone", "changed", "other"):
        (tmp_path / name).mkdir()
    tmp_path.chmod(0o700)
    place = {"bind": f"ipc://{tmp_path}/engine.sock", "saved_adapters": str(tmp_path / "state"), "adapters": 2}
    with serve_fake(tmp_path, **place) as server:  # type: ignore[arg-type]
        with server.connect() as wire:
            for call, (name, path) in enumerate({"late": "late", "gone": "gone", "changed": "other"}.items()):
                assert isinstance(wire.call(LoadAdapter(call, name, str(tmp_path / path))), Done)
            assert isinstance(wire.call(LoadAdapter(5, "a0", str(tmp_path / "late"), replace=True)), Done)
            assert isinstance(wire.call(UnloadAdapter(6, "a1")), Done)
            assert isinstance(wire.call(UnloadAdapter(7, "gone")), Done)
            before = contents(wire)
        assert server.stop() == 0
    (saved,) = (tmp_path / "state").iterdir()
    assert saved.stat().st_mode & 0o77 == 0
    shutil.rmtree(tmp_path / "other")
    with serve_fake(tmp_path, **place) as server:  # type: ignore[arg-type]
        with server.connect() as wire:
            after = contents(wire)
            assert after == {name: before[name] for name in ("late", "a0")} | {"a1": after["a1"]}, (
                "the command line names a1"
            )
            assert "adapter 'changed' is left out: " in server.log.read_text()
            wire.submit("r", prompt_token_ids=[1], adapter="changed")
            assert "No such file" in wire.answer("r").error.message
            assert isinstance(wire.call(UnloadAdapter(8, "changed")), Done), "it need not be served for that"
        assert server.stop() == 0


def settings(state: Path, **adapters: str) -> ServeSettings:
    return ServeSettings(model="/m", bind="ipc:///run/e.sock", saved_adapters=str(state), adapters=adapters)


def test_a_directory_of_adapters_decides_on_its_own(tmp_path: Path) -> None:
    """Adapters that came from it, and those that it has now, are not those of the last run."""
    entries = [AdapterEntry(name, Stamp(1), f"/all/{name}", "c") for name in ("same", "removed")]
    entries += [AdapterEntry("unloaded", Stamp(1)), AdapterEntry("other", Stamp(1), "/elsewhere/all/other", "c")]
    first = structs.replace(settings(tmp_path, same="/all/same"), adapters_folder="/all")
    SavedAdapters(first).write(entries)
    given = {"same": "/all/same", "unloaded": "/all/unloaded"}
    assert {entry.name for entry in SavedAdapters(structs.replace(first, adapters=given)).read()} == {"other"}


def test_the_command_line_has_priority_where_it_was_changed(tmp_path: Path) -> None:
    entries = [AdapterEntry(name, Stamp(1), f"/new/{name}", "c") for name in ("same", "changed", "free")]
    entries.append(AdapterEntry("unloaded", Stamp(2)))
    SavedAdapters(settings(tmp_path, same="/a", changed="/b", unloaded="/u")).write(entries)
    again = SavedAdapters(settings(tmp_path, same="/a", changed="/c", unloaded="/u"))
    assert {entry.name for entry in again.read()} == {"same", "free"}
    elsewhere = settings(tmp_path)
    assert SavedAdapters(ServeSettings(model="/other", bind=elsewhere.bind, saved_adapters=str(tmp_path))).read() == []
    assert SavedAdapters(ServeSettings(model="/m", bind=elsewhere.bind)).path is None


ENTRY = AdapterEntry("x", Stamp(1), "/x", "c")


def aside(state: Path) -> list[Path]:
    return [path for path in state.iterdir() if "damaged" in path.name]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"given": {}, "entries": [{"name": "../x"}]}', b"\xff" * 99])
def test_a_damaged_file_is_set_aside(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    saved = SavedAdapters(settings(tmp_path))
    saved.write([ENTRY])
    assert saved.path is not None
    saved.path.write_bytes(damage)
    again = SavedAdapters(settings(tmp_path))
    assert again.read() == [] and "are not read" in caplog.text
    (kept,) = aside(tmp_path)
    assert kept.read_bytes() == damage and f"renamed to {kept}" in caplog.text
    again.write([ENTRY])
    assert SavedAdapters(settings(tmp_path)).read() == [ENTRY] and aside(tmp_path) == [kept]


@pytest.mark.parametrize("kind", ["link", "writable", "pipe", "other owner"])
def test_a_file_that_others_could_have_written_is_not_read(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    saved = SavedAdapters(settings(state))
    saved.write([ENTRY])
    assert saved.path is not None
    reason = {"link": "a symbolic link", "pipe": "not a regular file", "writable": "mode 620"}.get(kind, "another user")
    if kind == "link":
        saved.path.rename(tmp_path / "mine")
        saved.path.symlink_to(tmp_path / "mine")
    elif kind == "pipe":
        saved.path.unlink()
        os.mkfifo(saved.path)
    elif kind == "writable":
        saved.path.chmod(0o620)
    else:
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
    assert SavedAdapters(settings(state)).read() == [] and reason in caplog.text
    assert len(aside(state)) == 1


def test_a_damaged_file_that_cannot_be_renamed_is_not_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SavedAdapters(settings(tmp_path))
    saved.write([ENTRY])
    path = saved.path
    assert path is not None
    path.write_bytes(b"{")

    def fail(*paths: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(os, "rename", fail)
    again = SavedAdapters(settings(tmp_path))
    assert again.read() == [] and "are not saved: read-only" in caplog.text
    again.write([ENTRY])
    assert path.read_bytes() == b"{"


def test_a_relative_path_is_saved_as_an_absolute_one(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    with serve_fake(tmp_path, adapters=1) as server, server.connect() as wire:
        assert isinstance(wire.call(LoadAdapter(1, "x", os.path.relpath(tmp_path / "v"))), Done)
        (entry,) = wire.call(ListAdapters(2)).entries
        assert os.path.isabs(entry.path) and os.path.samefile(entry.path, tmp_path / "v")


def test_changes_from_before_the_clock_was_set_back_count_as_made_now(tmp_path: Path) -> None:
    far, near = Stamp(1 << 50, 7, "engine"), Stamp(int(time.time() * 1000) + 30_000)
    SavedAdapters(settings(tmp_path)).write([AdapterEntry("x", far, "/x", "c"), AdapterEntry("y", near, "/y", "c")])
    x, y = SavedAdapters(settings(tmp_path)).read()
    HybridClock("any").observe(x.stamp)  # raises if it is far ahead
    assert (x.path, x.content) == ("/x", "c") and y.stamp == near


def test_the_file_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(os.fstat(fd).st_size))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("replace"), replace(*paths)))
    saved, entries = SavedAdapters(settings(tmp_path)), [AdapterEntry("x", Stamp(1), "/x", "c")]
    for _ in range(3):
        saved.write(entries)
    assert saved.path is not None
    assert order == [saved.path.stat().st_size, "replace"], "once for one list"


def test_a_stamped_change_is_checked(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    path = str(tmp_path / "v")
    with serve_fake(tmp_path, adapters=1) as server, server.connect() as wire:
        far = wire.call(LoadAdapter(1, "x", path, stamp=Stamp(1 << 50, 0, "evil")))
        assert isinstance(far, Error) and far.code == "invalid_request" and "ahead of the server's clock" in far.message
        assert isinstance(wire.call(LoadAdapter(2, "x", path)), Done)
        (entry,) = wire.call(ListAdapters(3)).entries
        assert (entry.name, entry.path) == ("x", path) and entry.content == contents(wire)["x"]
        for message in (LoadAdapter(4, "x", path, True, Stamp(1)), UnloadAdapter(5, "x", Stamp(1))):
            assert wire.call(message).code == "adapter_changed", "it is older than the server's"
        later = Stamp(entry.stamp.milliseconds + 1, 0, "other")
        wrong = wire.call(LoadAdapter(6, "x", path, True, later, "another version"))
        assert wrong.code == "adapter_error" and "files have changed" in wrong.message
        assert contents(wire)["x"] == entry.content
        assert isinstance(wire.call(LoadAdapter(7, "x", path, True, later, entry.content)), Done)
        with server.held():
            wire.submit("r", prompt_token_ids=[1, 2], adapter="x")
            wire.until(lambda: wire.answers["r"].accepted is not None)
            assert wire.call(UnloadAdapter(8, "x")).code == "adapter_in_use"
            last = Stamp(later.milliseconds + 1, 0, "other")
            assert isinstance(wire.call(UnloadAdapter(9, "x", last)), Done)
            assert "x" not in contents(wire)
        assert wire.answer("r").error is None, "what is open finishes"
        assert wire.call(ListAdapters(10)).entries[-1] == AdapterEntry("x", last)
    with serve_fake(tmp_path, adapters=1, admin=False) as server, server.connect() as wire:
        assert wire.call(LoadAdapter(1, "x", path, True, Stamp(1))).code == "forbidden"
