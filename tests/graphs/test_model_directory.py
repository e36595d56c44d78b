"""A model that is named: by its directory, or by a hub id whose files lie in the local cache as huggingface_hub puts
them there.
"""

from pathlib import Path

import pytest
from huggingface_hub import constants
from sidestream.graphs.config_fields import ConfigError
from sidestream.graphs.model_directory import model_directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with no way to the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def put(cache: Path, name: str, *files: str) -> Path:
    """A snapshot as `hf download` leaves it: files are links to blobs."""
    home = cache / ("models--" + name.replace("/", "--"))
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    (home / "blobs").mkdir()
    for place, file in enumerate(files):
        (home / "blobs" / str(place)).write_text("{}")
        (snapshot / file).symlink_to(home / "blobs" / str(place))
    return snapshot


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert model_directory(tmp_path) == tmp_path
    assert model_directory(str(tmp_path)) == tmp_path


def test_a_hub_id_is_found_in_the_local_cache(cache: Path) -> None:
    snapshot = put(cache, "org/name", "config.json")
    assert model_directory("org/name") == snapshot


@pytest.mark.parametrize("name", ["org/name", "Qwen/Qwen2.5-7B-Instruct"])
def test_a_hub_id_that_is_not_there_says_how_to_download_it(cache: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"hf download {name} --local-dir models/"):
        model_directory(name)
    put(cache, name, "README.md")
    with pytest.raises(ConfigError, match=f"without its config.json: run `hf download {name}"):
        model_directory(name)


@pytest.mark.parametrize("name", ["nowhere", "/nowhere/at/all", "org/name/more", "../name", "org/na me"])
def test_other_names_are_no_hub_ids(cache: Path, name: str) -> None:
    assert model_directory(name) == Path(name)


def test_a_name_that_is_too_long_is_quoted_in_part() -> None:
    with pytest.raises(
        ConfigError, match=r"'x{100}...' cannot be read .File name too long.; name a directory or a hub id"
    ):
        model_directory("x" * 5000)


def test_a_cache_that_is_damaged_says_how_to_do_without(cache: Path) -> None:
    put(cache, "org/name", "config.json")
    (cache / "models--org--name" / "refs" / "main").write_bytes(b"\xff\xfe")
    with pytest.raises(
        ConfigError, match=r"'org/name' cannot be read from the local hub cache .*`hf download org/name"
    ):
        model_directory("org/name")


def test_gguf_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    for named in (tmp_path, str(tmp_path / "model.Q4_K_M.gguf")):
        with pytest.raises(ConfigError, match=r"gguf_file='model.Q4_K_M.gguf'"):
            model_directory(named)
    (tmp_path / "config.json").write_text("{}")  # both kinds of files in one directory: the other kind is taken
    assert model_directory(tmp_path) == tmp_path
