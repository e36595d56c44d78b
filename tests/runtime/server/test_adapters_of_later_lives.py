"""A process of the server that is started again serves the adapters that there were, and does without those that can't
be read any more.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from sidestream.runtime.protocol.messages import Done, Error, ListAdapters, LoadAdapter, Sampling, UnloadAdapter
from sidestream.runtime.server.settings import ServeSettings
from support.fake_runner import continuation
from support.serving import GUARD, Wire, serve, serve_fake
from support.tiny import AdapterSpec, oracle_greedy, tiny_adapters, tiny_llama

SHORT = Sampling(temperature=0.0, ignore_eos=True, max_tokens=6)


def names(wire: Wire) -> set[str]:
    return {info.name for info in wire.call(ListAdapters(9)).adapters}


@pytest.mark.parametrize("role", ["fake_gpu", "server.batcher"])
def test_what_clients_have_loaded_and_unloaded_stays_so(tmp_path: Path, role: str) -> None:
    (tmp_path / "late").mkdir()
    with serve_fake(tmp_path, adapters=2) as server:
        with server.connect() as wire:
            assert isinstance(wire.call(LoadAdapter(1, "late", str(tmp_path / "late"))), Done)
            assert isinstance(wire.call(LoadAdapter(2, "a0", str(tmp_path / "late"), replace=True)), Done)
            assert isinstance(wire.call(UnloadAdapter(3, "a1")), Done)
        shutil.rmtree(tmp_path / "a0")  # the place of a former version
        shutil.rmtree(tmp_path / "a1")
        for _ in range(2):
            server.replace(role)
            with server.connect() as wire:
                assert names(wire) == {"late", "a0"}
        assert server.stop() == 0


def test_a_loaded_adapter_that_is_gone_is_left_out_until_it_is_loaded_again(tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    with serve_fake(tmp_path, adapters=1) as server:
        with server.connect() as wire:
            assert isinstance(wire.call(LoadAdapter(1, "late", str(tmp_path / "late"))), Done)
        shutil.rmtree(tmp_path / "late")
        server.replace("fake_gpu")
        with server.connect() as wire:
            assert names(wire) == {"a0"}
            wire.submit("r", SHORT, prompt_token_ids=[7, 8], adapter="late")
            error = wire.answer("r").error
            assert error.code == "unknown_adapter" and "could not be read when the engine started" in error.message
            assert "No such file or directory" in error.message and str(tmp_path) not in error.message
            wire.submit("s", SHORT, prompt_token_ids=[7, 8])
            assert wire.answer("s").token_ids[0] == continuation([7, 8], -1, 6, 251)
            (tmp_path / "late").mkdir()
            assert isinstance(wire.call(LoadAdapter(2, "late", str(tmp_path / "late"))), Done)
            wire.submit("t", SHORT, prompt_token_ids=[7, 8], adapter="late")
            assert wire.answer("t").error is None


def test_a_link_that_leads_elsewhere_now_is_not_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    base = tiny_llama(tmp_path / "base")
    (made,) = tiny_adapters(base, [AdapterSpec(rank=4)])
    root.mkdir()
    shutil.copytree(made, root / "version1")
    shutil.copytree(made, elsewhere)
    (root / "current").symlink_to("version1")
    with serve(settings(base.path, {}, max_loras=1, max_lora_rank=8, roots=[root]), tmp_path / "log") as server:
        with server.connect() as wire:
            assert isinstance(wire.call(LoadAdapter(1, "mine", str(root / "current")), 60), Done)
        (root / "current").unlink()
        (root / "current").symlink_to(elsewhere)
        server.replace("gpu_process")
        with server.connect() as wire:
            assert names(wire) == set()
            error = wire.call(LoadAdapter(2, "mine", str(root / "current")))
            assert isinstance(error, Error) and error.code == "forbidden"


def settings(model: Path, adapters: dict[str, Path], roots: list[Path], **llm: Any) -> ServeSettings:
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "num_kv_pages": 8, "show_progress": False}
    return ServeSettings(
        model=str(model),
        llm={"device": "cpu", "precision": "fp32", **sizes, **llm},
        adapters={name: str(path) for name, path in adapters.items()},
        adapter_roots=[str(root) for root in roots],
    )


@pytest.mark.parametrize("damage, ranks", [("gone", 1), ("no numbers", 1), ("too large", 1), ("gone", 2)])
def test_a_damaged_adapter_of_the_start_ends_nothing(tmp_path: Path, damage: str, ranks: int) -> None:
    """The first life's room for adapters stays: what was loaded into it fits, though nothing else is left."""
    base = tiny_llama(tmp_path / "base")
    first, later, large = tiny_adapters(
        base, [AdapterSpec(rank=4), AdapterSpec(rank=8, use_rslora=True), AdapterSpec(rank=40)]
    )
    prompt = [3, 1, 4, 1, 5]
    chosen = settings(base.path, {"first": first}, [later], tensor_parallel_size=ranks)
    with serve(chosen, tmp_path / "log") as server:
        with server.connect() as wire:
            assert isinstance(wire.call(LoadAdapter(1, "later", str(later)), 60), Done)
        weights = first / "adapter_model.safetensors"
        if damage == "gone":
            shutil.rmtree(first)
        elif damage == "too large":
            shutil.copytree(large, first, dirs_exist_ok=True)
        else:
            content = bytearray(weights.read_bytes())
            content[-4096:] = b"\xff" * 4096
            weights.write_bytes(content)
        server.replace("gpu_process")
        assert "adapter 'first' is left out: " in server.log.read_text()
        with server.connect() as wire:
            assert names(wire) == {"later"}
            wire.submit("later", SHORT, prompt_token_ids=prompt, adapter="later")
            wire.submit("base", SHORT, prompt_token_ids=prompt)
            answers = [wire.answer(request, 60).token_ids[0] for request in ("later", "base")]
            assert answers == [oracle_greedy(base, later, prompt, 6), oracle_greedy(base, None, prompt, 6)]
            wire.submit("first", SHORT, prompt_token_ids=prompt, adapter="first")
            error = wire.answer("first").error
            assert error.code == "unknown_adapter" and str(tmp_path) not in error.message


def test_a_damaged_adapter_of_a_followed_directory_does_not_prevent_the_start(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    good, bad = tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=8)])
    root = tmp_path / "root"
    for name, made in (("good", good), ("bad", bad)):
        shutil.copytree(made, root / name)
    os.truncate(root / "bad" / "adapter_model.safetensors", 1000)
    limits = {"max_loras": 2, "max_lora_rank": 16, "lora_target_modules": ["all"]}
    chosen = settings(base.path, {"good": root / "good", "bad": root / "bad"}, [root], **limits)
    chosen = structs.replace(chosen, adapters_folder=str(root))
    with serve(chosen, tmp_path / "log") as server, server.connect() as wire:
        assert names(wire) == {"good"} and "adapter 'bad' is left out: " in server.log.read_text()
        wire.submit("bad", SHORT, prompt_token_ids=[3], adapter="bad")
        assert "could not be read when the engine started" in wire.answer("bad").error.message
        wire.submit("else", SHORT, prompt_token_ids=[3], adapter="else")
        assert "(known: good)" in wire.answer("else").error.message
        shutil.copytree(bad, root / "bad", dirs_exist_ok=True)
        assert isinstance(wire.call(LoadAdapter(1, "bad", str(root / "bad")), 60), Done)
        assert names(wire) == {"good", "bad"}


def test_a_start_that_fails_after_a_death_is_tried_again(tmp_path: Path) -> None:
    """The disk was away for a moment."""
    with serve_fake(tmp_path, adapters=1) as server:
        with server.connect():
            pass
        (tmp_path / "a0" / "unreadable").touch()
        server.replace("fake_gpu")
        assert "error: " in server.log.read_text()
        with server.connect() as wire:
            wire.submit("r", SHORT, prompt_token_ids=[7, 8], adapter="a0")
            assert wire.answer("r").error is None
        assert server.stop() == 0


def test_a_start_that_keeps_failing_ends_the_server(tmp_path: Path) -> None:
    with serve_fake(tmp_path, adapters=1) as server:
        with server.connect():
            pass
        (tmp_path / "a0").rmdir()
        os.kill(server.child("fake_gpu"), signal.SIGKILL)
        assert server.process.wait(GUARD) == 1
        log = server.log.read_text()
        assert log.count("error: ") == 4 and "No such file or directory" in log
