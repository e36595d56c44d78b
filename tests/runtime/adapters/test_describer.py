"""Adapters are described in a child process, with the same result as in this one; a fault there raises one error."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file
from sidestream.graphs.adapter_config import CONFIG, AdapterConfig, AdapterError
from sidestream.graphs.adapter_description import Description, describe_adapter, describe_update
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.files.update_file import private_update
from sidestream.graphs.model_directory import WEIGHTS
from sidestream.runtime.adapters import describer as describer_module
from sidestream.runtime.adapters.describer import AdapterDescriber
from sidestream.runtime.api.adapter_update import AdapterUpdate
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.server.gpu_process import ServedModel
from sidestream.runtime.server.settings import ServeSettings

CONFIG_OF_DEMO = LlamaConfig.from_directory(DEMO_MODEL)


@pytest.fixture(scope="module")
def describer() -> Iterator[AdapterDescriber]:
    made = AdapterDescriber()
    yield made
    made.close()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A copy that a test may change."""
    for name in (CONFIG, WEIGHTS):
        (tmp_path / name).write_bytes((DEMO_MODEL / "adapters" / "pirate" / name).read_bytes())
    return tmp_path


def configure(path: Path, **fields: Any) -> None:
    (path / CONFIG).write_text(json.dumps({**json.loads((path / CONFIG).read_text()), **fields}))


@pytest.mark.parametrize("name", ["shout", "pirate", "json", "yoda"])
def test_the_same_as_in_this_process(describer: AdapterDescriber, name: str) -> None:
    directory, roots = DEMO_MODEL / "adapters" / name, [DEMO_MODEL.resolve()]
    expected = describe_adapter(directory, CONFIG_OF_DEMO, 128, False, roots)
    assert describer(directory, CONFIG_OF_DEMO, 128, False, roots) == expected
    assert len(expected.pairs) > 1 and set(expected.scaling) == set(expected.pairs)


def test_refusals_have_the_same_words(describer: AdapterDescriber, adapter: Path) -> None:
    def refusal(describe: Any, **options: Any) -> str:
        with pytest.raises(AdapterError) as problem:
            describe(adapter, CONFIG_OF_DEMO, options.get("rank", 128), options.get("lenient", False), None)
        return str(problem.value)

    assert refusal(describer, rank=1) == refusal(describe_adapter, rank=1)
    configure(adapter, rank_pattern={"(a": 3})
    assert refusal(describer) == refusal(describe_adapter)
    configure(adapter, rank_pattern={}, surprise="yes")
    assert "unknown field 'surprise'" in refusal(describer)
    assert describer(adapter, CONFIG_OF_DEMO, 128, True, None).pairs, "lenient"
    too_long = adapter / ("n" * 300)
    assert "cannot be read (File name too long)" in refusal(lambda _, *more: describer(too_long, *more))
    (adapter / WEIGHTS).unlink()
    os.mkfifo(adapter / WEIGHTS)
    assert "is not a regular file" in refusal(lambda *a: describer(adapter, CONFIG_OF_DEMO, 128, True, None))


def test_a_child_that_hangs_or_dies_costs_one_error(adapter: Path) -> None:
    describer = AdapterDescriber(seconds=60.0)

    def describe() -> Description:
        return describer(adapter, CONFIG_OF_DEMO, 128, False, None)

    def child() -> int:
        process = describer._child._child
        assert process is not None
        return process.pid

    try:
        expected = describe()
        first = child()
        os.kill(first, signal.SIGKILL)
        assert describe() == expected and child() != first, "one that died unasked is replaced"
        os.kill(child(), signal.SIGSTOP)
        describer._seconds = 0.2
        with pytest.raises(AdapterError, match=r"took more than 0\.2 s to read"):
            describe()
        describer._seconds = 60.0
        assert describe() == expected
    finally:
        describer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def wrong_descriptions(found: Description) -> Iterator[tuple[str, Description]]:
    """Descriptions that a child should not send."""
    module, (name_a, name_b) = next(iter(found.pairs.items()))
    place = found.layout.places[name_a]

    def moved(**changes: Any) -> Description:
        places = found.layout.places | {name_a: place._replace(**changes)}
        return msgspec.structs.replace(found, layout=msgspec.structs.replace(found.layout, places=places))

    yield "beyond the file", moved(first=found.layout.size, last=found.layout.size + place.last - place.first)
    yield "in the header", moved(first=0, last=place.last - place.first)
    yield "another size", moved(last=place.last + 4)
    yield "another shape", moved(shape=(place.shape[0], place.shape[1] * 2))
    yield "another dtype", moved(dtype="I8")
    yield "one module less", msgspec.structs.replace(found, pairs=dict(list(found.pairs.items())[1:]))
    yield "no modules", msgspec.structs.replace(found, pairs={})
    yield "a strange module", msgspec.structs.replace(found, pairs=found.pairs | {"lm_head": (name_a, name_b)})
    yield "no tensor", msgspec.structs.replace(found, pairs=found.pairs | {module: (name_a, "other")})
    yield "infinite", msgspec.structs.replace(found, scaling=found.scaling | {module: float("inf")})


def test_a_wrong_description_is_rejected(monkeypatch: pytest.MonkeyPatch, adapter: Path) -> None:
    found = describe_adapter(adapter, CONFIG_OF_DEMO, 128)
    describer = AdapterDescriber()
    for what, wrong in [("rank", found), *wrong_descriptions(found)]:
        answer = msgspec.json.encode(describer_module.DescribeResponse(wrong)) + b"\n"
        monkeypatch.setattr(describer._child, "ask", lambda line, seconds, answer=answer: answer)
        with pytest.raises(AdapterError, match="could not be described"):
            describer(adapter, CONFIG_OF_DEMO, 1 if what == "rank" else 128, False, None)
    monkeypatch.setattr(describer._child, "ask", lambda line, seconds: b"[" * 100_000 + b"\n")
    with pytest.raises(AdapterError, match="could not be described"):
        describer(adapter, CONFIG_OF_DEMO, 128, False, None)


def test_the_gpu_process_parses_no_adapter(monkeypatch: pytest.MonkeyPatch, adapter: Path) -> None:
    """Neither those of its start nor those that clients load."""
    monkeypatch.setattr(AdapterConfig, "from_directory", lambda *_: pytest.fail("it was parsed in this process"))
    llm = {"device": "cpu", "precision": "fp32", "max_model_len": 128, "max_num_seqs": 2, "num_kv_pages": 8}
    settings = ServeSettings(
        directory="/", generation=0, model=str(DEMO_MODEL), adapters={"first": str(DEMO_MODEL / "adapters" / "pirate")},
        adapter_roots=[str(adapter)], llm={**llm, "max_lora_rank": 128, "max_loras": 2, "show_progress": False},
    )  # fmt: skip
    served = ServedModel(settings)
    assert [each.name for each in served.ready.adapters] == ["first"]
    loaded = served.add_adapter("mine", str(adapter), False)
    assert loaded.content == served.add_adapter("again", str(adapter), False).content
    configure(adapter, use_dora=True)
    with pytest.raises(AdapterError, match="use_dora = True, but"):
        served.add_adapter("third", str(adapter), False)


def test_updates_with_one_header_are_described_once(adapter: Path) -> None:
    """Those of a training run; any other config, shape, or limit is described anew."""
    fields, tensors = json.loads((adapter / CONFIG).read_text()), load_file(adapter / WEIGHTS)

    def describe(limit: int = 128, factor: float = 1.0, rows: int | None = None, **changes: Any) -> tuple[Any, bool]:
        """Return a description or an error, and whether the child was asked."""
        describer._child.close()  # the next request starts one
        changed = {name: (tensor[:rows] if "lora_A" in name else tensor) * factor for name, tensor in tensors.items()}
        update = AdapterUpdate(changed, {**fields, **changes}, "pin")
        with private_update(update.nbytes, update.copy) as file:
            found = outcome(lambda: describer.describe_update(file.handle, CONFIG_OF_DEMO, limit, False))
            assert found == outcome(lambda: describe_update(file.handle, CONFIG_OF_DEMO, limit, False))
        return found, describer._child._child is not None

    describer = AdapterDescriber()
    try:
        first, asked = describe()
        assert asked and isinstance(first, Description)
        assert describe(factor=2.0) == (first, False)
        other, asked = describe(lora_alpha=fields["lora_alpha"] * 2)
        assert asked and other.scaling != first.scaling
        for wrong in ({"limit": 1}, {"rows": 1}, {"peft_type": "LOHA"}):
            error, asked = describe(**wrong)
            assert asked and isinstance(error, str)
        assert describe() == (first, False)
        for alpha in range(describer_module.KEPT_UPDATES):
            describe(lora_alpha=100 + alpha)
        assert describe() == (first, True)
    finally:
        describer.close()


def outcome(describe: Callable[[], Description]) -> Any:
    try:
        return describe()
    except AdapterError as error:
        return str(error)
