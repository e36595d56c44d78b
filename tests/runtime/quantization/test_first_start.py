"""An engine that calibrates a model when it first starts: once, where it is soon done, and never unasked on a CPU."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.compiler.program.cache_folder import CacheFolder
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.llm import LLM
from sidestream.runtime.quantization.calibration import load_calibration
from sidestream.runtime.quantization.rounded_weights import open_rounding
from sidestream.runtime.worker.calibrate import first_start
from sidestream.runtime.worker.model_loader import find_model
from sidestream.tools.options.models import SHAPES
from support.tiny import TinyBase, tiny_llama

ENGINE: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("first"), tokenizer=True)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A CPU counts as a GPU, and a tiny model as one that is served; the folder of what is kept."""
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path))
    for name, value in {"DEVICES": ("cpu",), "MIN_PARAMETERS": 0, "ROUND_TOKENS": 300, "LENGTH": 100}.items():
        monkeypatch.setattr(first_start, name, value)
    monkeypatch.setattr(first_start, "_free_bytes", lambda device: 1 << 40)
    return tmp_path / "calibrations"


def start(base: TinyBase, **options: Any) -> Any:
    return LLM(base.path, **{"precision": "int8", **ENGINE, **options}).compiled.options


def test_the_first_start_calibrates_and_the_next_one_finds_it(
    base: TinyBase, soon: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = start(base)
    said = capfd.readouterr().err
    assert said.count("calibrating, once for this model") == said.count("calibrated in") == 1
    assert "calibration='off'" in said
    assert used.rounded_weights and used.smooth_channels and used.rotate_values and used.norm_rotation == 64
    (calibration,), (rounded,) = soon.glob("*calibration.safetensors"), soon.glob("*int8.safetensors")
    assert load_calibration(calibration).tokens == 300 and open_rounding(rounded).origin.tokens == 300
    assert not [path for path in base.path.iterdir() if path.name.startswith("sidestream")]

    def refused(*given: Any, **more: Any) -> None:
        raise AssertionError("it calibrates again")

    with monkeypatch.context() as patched:
        patched.setattr(first_start, "round_weights", refused)
        assert start(base) == used and "calibrating" not in capfd.readouterr().err
        assert not start(base, rounded_weights="off").rounded_weights
        off = start(base, calibration="off")
        assert not off.smooth_channels and not off.rounded_weights

    rounded.write_bytes(rounded.read_bytes()[:-1] + b"\x55")
    assert start(base) == used and "calibrated in" in capfd.readouterr().err


def test_engines_that_start_together_use_one_calibration(
    base: TinyBase, soon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine waits for the first; the files of both would differ on GPUs."""
    both, made = threading.Barrier(2), []

    def calibrate(folder: CacheFolder, key: str, *given: Any) -> tuple[Path, Path]:
        made.append(key)
        names = first_start._file_names(key)
        for name in names[:2]:
            folder.keep(name, b"")
        paths = folder.directory / names[0], folder.directory / names[1]
        folder.keep(names[2], " ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths).encode())
        return paths

    def estimated(config: LlamaConfig) -> float:
        both.wait(60)  # both have found nothing
        return 1.0

    monkeypatch.setattr(first_start, "_calibrate", calibrate)
    monkeypatch.setattr(first_start, "estimate_seconds", estimated)
    source, options = find_model(base.path, precision="int8", show_progress=False, **ENGINE)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(first_start.calibrate_at_first_start, source, options) for _ in range(2)]
    engines = [each.result().engine for each in found]
    assert len(made) == 1 and engines[0].calibration == engines[1].calibration
    assert engines[0].rounded_weights == engines[1].rounded_weights


def test_a_cached_file_that_cannot_be_read_is_made_again(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "calibrations", 1 << 20)
    for name, content in zip(first_start._file_names("key"), (b"", b"", b"aa bb"), strict=True):
        folder.keep(name, content)
    unreadable = folder.directory / first_start._file_names("key")[0]
    unreadable.unlink()
    unreadable.mkdir(mode=0o700)  # opens, and reading it is an error, as on a damaged disk
    assert first_start._find(folder, "key") is None


def test_what_goes_wrong_is_said_and_the_model_served(
    base: TinyBase, soon: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(first_start, "round_weights", full)
    assert not start(base).rounded_weights
    assert "served without a calibration: OSError: no space left" in capfd.readouterr().err


def test_a_model_that_takes_long_gets_a_line(
    base: TinyBase, soon: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_start, "MAX_SECONDS", 1.0)
    assert not start(base).rounded_weights
    said = capfd.readouterr().err
    assert f"sidestream calibrate {base.path} --round" in said and "about 1 min" in said
    assert first_start.estimate_seconds(LlamaConfig.from_dict(SHAPES["llama-3.1-8b"])) > 60
    smollm: dict[str, Any] = {
        **SHAPES["llama-3.1-8b"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    assert first_start.estimate_seconds(LlamaConfig.from_dict(smollm)) < 60


def test_on_a_cpu_nothing_is_calibrated(base: TinyBase, capfd: pytest.CaptureFixture[str]) -> None:
    assert not start(base).rounded_weights and "calibrating" not in capfd.readouterr().err


@pytest.mark.gpu
def test_small_models_start_as_before_on_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert torch.cuda.is_available() and not LLM(show_progress=True).compiled.options.rounded_weights
    assert "calibrating" not in capfd.readouterr().err
