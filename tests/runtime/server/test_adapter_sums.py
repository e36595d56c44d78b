"""Weighted sums of adapters over the wire: requests, names, parts that change, and refusals."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sidestream.runtime.api.adapter_sum import sum_content
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.client.client import Client
from sidestream.runtime.protocol.messages import (
    AdapterWeight,
    Done,
    Error,
    ListAdapters,
    LoadAdapter,
    Sampling,
    UnloadAdapter,
)
from support.serving import GUARD, Server, Wire, serve_fake

SHORT = Sampling(temperature=0.0, ignore_eos=True, max_tokens=6)
PROMPT = [index % 90 for index in range(130)]


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_fake(tmp_path_factory.mktemp("sums"), adapters=3, lora_rank=16) as server:
        yield server
        server.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serve_fake(tmp_path, adapters=3) as server:
        yield server
        server.stop()


def weights(**given: float) -> list[AdapterWeight]:
    return [AdapterWeight(name, weight) for name, weight in given.items()]


def ask(wire: Wire, request_id: str, **fields: Any) -> Any:
    wire.submit(request_id, SHORT, prompt_token_ids=PROMPT, **fields)
    return wire.answer(request_id)


def infos(wire: Wire) -> dict[str, Any]:
    return {info.name: info for info in wire.call(ListAdapters(90)).adapters}


def test_equal_sums_share_pages_and_a_replaced_part_makes_another(server: Server, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with server.connect() as wire:
        first = ask(wire, "first", adapters=weights(a0=0.7, a1=0.3))
        assert first.error is None and first.usage.cached_tokens == 0
        assert ask(wire, "same", adapters=weights(a1=0.3, a2=0, a0=0.7)).usage.cached_tokens == 128
        assert ask(wire, "other", adapters=weights(a0=0.7, a1=-0.3)).usage.cached_tokens == 0
        plain = ask(wire, "plain", adapter="a0")
        assert plain.token_ids == ask(wire, "one", adapters=weights(a0=1)).token_ids != first.token_ids
        assert isinstance(wire.call(LoadAdapter(1, "a1", str(tmp_path / "new"), replace=True)), Done)
        assert ask(wire, "replaced", adapters=weights(a0=0.7, a1=0.3)).usage.cached_tokens == 0
        assert isinstance(wire.call(UnloadAdapter(2, "a1")), Done)
        error = ask(wire, "removed", adapters=weights(a0=0.7, a1=0.3)).error
        assert error.code == "unknown_adapter" and "adapter 'a1' is not known" in error.message


def test_a_part_is_in_use_while_its_sum_answers(tmp_path: Path) -> None:
    with serve_fake(tmp_path, adapters=2) as server, server.connect() as wire:
        with server.held(beyond=20):
            long = Sampling(temperature=0.0, ignore_eos=True, max_tokens=100)
            wire.submit("long", long, prompt_token_ids=[5, 6], adapters=weights(a0=0.5, a1=0.5))
            wire.until(lambda: bool(wire.answers["long"].token_ids))
            refused = wire.call(UnloadAdapter(1, "a1"))
        assert isinstance(refused, Error) and refused.code == "adapter_in_use"
        assert wire.answer("long").error is None
        assert isinstance(wire.call(UnloadAdapter(2, "a1")), Done)
        server.stop()


@pytest.mark.parametrize("role", ["fake_gpu", "server.batcher"])
def test_sums_and_their_names_survive_a_restart_of_a_process(tmp_path: Path, role: str) -> None:
    with serve_fake(tmp_path, adapters=2) as server:
        with server.connect() as wire:
            assert isinstance(wire.call(LoadAdapter(1, "mix", "sum:a0*0.7+a1*0.3")), Done)
            named = ask(wire, "named", adapter="mix")
            assert ask(wire, "weights", adapters=weights(a1=0.3, a0=0.7)).usage.cached_tokens == 128
            assert infos(wire)["mix"].where == "gpu" and infos(wire)["mix"].rank == 16
        server.replace(role)
        with server.connect() as wire:
            assert infos(wire)["mix"].content == sum_content(
                (infos(wire)[name].content, weight) for name, weight in (("a0", 0.7), ("a1", 0.3))
            )
            again = ask(wire, "again", adapter="mix")
            assert again.error is None and again.usage.cached_tokens == 0
            assert len(again.token_ids[0]) == len(named.token_ids[0])
        assert server.stop() == 0


def test_a_named_sum_follows_its_parts_and_is_replaced_and_unloaded(server: Server, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with server.connect() as wire:
        assert isinstance(wire.call(LoadAdapter(1, "mix", "sum:a0*0.7+a1*0.3")), Done)
        before = infos(wire)["mix"].content
        assert wire.call(LoadAdapter(2, "mix", "sum:a0*0.5")).code == "adapter_in_use"
        assert isinstance(wire.call(LoadAdapter(3, "a1", str(tmp_path / "new"), replace=True)), Done)
        assert infos(wire)["mix"].content not in ("", before)
        assert isinstance(wire.call(LoadAdapter(4, "mix", "sum:a2", replace=True)), Done)
        assert infos(wire)["mix"].content == infos(wire)["a2"].content
        assert ask(wire, "alias", adapter="mix").token_ids == ask(wire, "a2", adapter="a2").token_ids
        assert isinstance(wire.call(UnloadAdapter(5, "a2")), Done)
        assert infos(wire)["mix"].content == ""
        assert "adapter 'a2' is not known" in ask(wire, "gone", adapter="mix").error.message
        assert isinstance(wire.call(LoadAdapter(6, "a0", "sum:a1*0.5", replace=True)), Done)
        assert infos(wire)["a0"].content == sum_content([(infos(wire)["a1"].content, 0.5)])
        assert isinstance(wire.call(LoadAdapter(7, "mix", str(tmp_path / "new"), replace=True)), Done)
        assert ask(wire, "directory", adapter="mix").error is None
        assert isinstance(wire.call(UnloadAdapter(8, "a0")), Done) and "a0" not in infos(wire)
        assert ask(wire, "unloaded", adapter="a0").error.code == "unknown_adapter"


def test_a_client_gives_weights_as_a_dict(server: Server) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    mixed: list[Any] = [{"a0": 0.7, "a1": 0.3}, "a0", {"a0": 1, "a2": 0.0}, None]
    with Client(server.address, connect_timeout=GUARD) as client:
        outputs = client.generate([[7, 8]] * 4, params, adapter=mixed)
        tokens = [output.outputs[0].token_ids for output in outputs]
        assert outputs[0].adapter == "a0*0.7+a1*0.3"
        assert tokens[1] == tokens[2] and len({str(each) for each in tokens}) == 3
        streamed = client.stream([7, 8], params, {"a1": 0.3, "a0": 0.7})
        assert [token for chunk in streamed for token in chunk.token_ids] == tokens[0]
        with pytest.raises(RequestError, match=r"adapter\[1\]: the weight of 'a0' is nan"):
            client.generate([[7]] * 2, params, adapter=["a0", {"a0": float("nan")}])
        with pytest.raises(RequestError, match="adapter 'z' is not known"):
            client.generate([[7]], params, adapter={"a0": 0.5, "z": 0.5})


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"adapters": weights(a0=0.5, z=0.5)}, "unknown_adapter", "adapter 'z' is not known"),
        ({"adapters": weights(a0=0.0)}, "invalid_request", "adapters has no weight other than 0"),
        ({"adapters": weights(a0=float("nan"))}, "invalid_request", "weight"),
        ({"adapters": [*weights(a0=0.5), *weights(a0=0.5)]}, "invalid_request", "adapter 'a0' twice"),
        ({"adapters": weights(a0=0.5), "adapter": "a1"}, "invalid_request", "adapter and adapters both"),
        ({"adapters": weights(mix=0.5, a0=1)}, "invalid_request", "adapter 'mix' is a sum"),
        ({"adapters": weights(a0=1, a1=1, a2=1)}, "invalid_request", "rank 24.*--max-lora-rank 24"),
        ({"adapters": weights(a0=101.0)}, "invalid_request", "<= 100.0 - at `..adapters.0..weight"),
        ({"adapters": weights(**{f"a{index}": 0.5 for index in range(9)})}, "invalid_request", "length <= 8"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_cannot_be_summed_is_refused(refusing: Server, fields: dict[str, Any], code: str, words: str) -> None:
    with refusing.connect() as wire:
        assert isinstance(wire.call(LoadAdapter(1, "mix", "sum:a0*0.7+a1*0.3", replace=True)), Done)
        wire.submit("r", SHORT, prompt_token_ids=[5, 6], **fields)
        error = wire.answer("r").error
        assert error.code == code and re.search(words, error.message), error


@pytest.mark.parametrize(
    ("name", "path", "code", "words"),
    [
        ("b", "sum:", "invalid_request", "'' is not a sum of adapters"),
        ("b", "sum:a1*0.5+a0*0.5", "invalid_request", "is not a sum of adapters, such as"),
        ("b", "sum:a0*nan", "invalid_request", "is not a sum of adapters"),
        ("b", "sum:a0*0.5+z*0.5", "unknown_adapter", "adapter 'z' is not known"),
        ("b", "sum:mix*0.5", "invalid_request", "adapter 'mix' is a sum"),
        ("a0", "sum:a0*0.5", "adapter_in_use", "already been loaded"),
        ("b", "sum:a0*1.5+a1*0.5+a2*0.5", "adapter_error", "rank 24 .*--max-lora-rank 24"),
    ],
)
def test_what_cannot_be_named_is_refused(refusing: Server, name: str, path: str, code: str, words: str) -> None:
    with refusing.connect() as wire:
        assert isinstance(wire.call(LoadAdapter(1, "mix", "sum:a0*0.7+a1*0.3", replace=True)), Done)
        error = wire.call(LoadAdapter(2, name, path))
        assert error.code == code and re.search(words, error.message), error
        assert set(infos(wire)) == {"a0", "a1", "a2", "mix"}
