"""API keys: the file, its reload in a running gateway, and the command that edits it."""

import logging
import os
import re
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sidestream.runtime.gateway.auth import edit_keys_file
from sidestream.runtime.gateway.auth.key_store import Key, KeysFileError, KeyStore, hash_of, parse
from sidestream.tools.cli import main


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "keys.toml"


def added(path: Path, name: str = "one", **rights: object) -> str:
    return edit_keys_file.add(path, Key(name, "", "search", **rights))  # type: ignore[arg-type]


def test_a_key_is_found_by_itself_and_not_stored(path: Path) -> None:
    key = added(path, models=("llama", "sql-*"), tokens_per_minute=1000, admin=True)
    assert re.fullmatch(r"sk-sidestream-[A-Za-z0-9_-]{43}", key)
    assert key not in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    book = KeyStore(path)
    found = book.find(key)
    assert found is not None and found.owner == "search" and found.tokens_per_minute == 1000 and found.admin
    for other in (key[:-1], key + "x", key.lower(), "", hash_of(key), "\udcff"):
        assert book.find(other) is None


def test_a_revoked_key_is_not_found_at_the_next_look(path: Path) -> None:
    keys = {name: added(path, name) for name in ("one", "two", "three")}
    book = KeyStore(path)
    assert all(book.find(key) for key in keys.values())
    assert edit_keys_file.revoke(path, "two").name == "two"
    assert book.find(keys["two"]) is None
    assert book.find(keys["one"]) and book.find(keys["three"])
    assert book.find(added(path, "two")) is not None, "a name may be used again"


def test_changes_within_one_tick_of_the_clock_are_seen(path: Path) -> None:
    """Two writes to one file of one size, with one time: only the content tells them apart."""
    added(path)
    now = path.stat()
    book = KeyStore(path)
    assert "one" in book.keys
    path.write_text(path.read_text().replace("keys.one", "keys.two"))
    os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns))
    book.refresh()
    assert list(book.keys) == ["two"]


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ("[keys.one", 0o600, "not valid TOML"),
        ("[keys.one]\nhash = 1", 0o600, "hash is missing or not a string"),
        (None, 0o600, "No such file"),
        ("", 0o666, "chmod 600"),
        ("#" * (1 << 20) + "\n", 0o600, "larger than"),
    ],
)
def test_a_broken_file_keeps_the_old_keys(
    path: Path, content: str | None, mode: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = added(path)
    good = path.read_bytes()
    book = KeyStore(path)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
        path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert book.find(key) is not None
    assert said in book.problem and book.failures == 1
    assert len(caplog.records) == 1 and key not in caplog.text
    path.write_bytes(good)
    path.chmod(0o600)
    book.refresh()
    assert book.problem == "" and book.find(key)


def test_a_book_is_not_made_of_what_is_no_keys_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "open").touch(0o600)
    (tmp_path / "open").chmod(0o620)
    for name, said in (
        ("pipe", "regular file"),
        ("missing", "sidestream keys http add"),
        ("open", "may write"),
    ):
        with pytest.raises(KeysFileError, match=said):
            KeyStore(tmp_path / name)


HASH = hash_of("k")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("key = 1", "'key'"),
        ("keys = 3", "tables"),
        ("keys.one = 3", r"\[keys.one\]"),
        ('[keys."a b"]\nhash="x"\nowner="o"', "letters, digits"),
        (f'[keys.one]\nhash="{HASH}"', "owner is missing"),
        ('[keys.one]\nhash="md5:00"\nowner="o"', "sha256:"),
        (f'[keys.one]\nhash="{HASH}"\nowner="o\\nx"', "owner must have"),
        (f'[keys.one]\nhash="{HASH}"\nowner="o"\nmodels="all"', "models must be a list"),
        (f'[keys.one]\nhash="{HASH}"\nowner="o"\nmodels=["(a"]', "models must be a list"),
        (f'[keys.one]\nhash="{HASH}"\nowner="o"\ntokens_per_minute=0', "tokens_per_minute must be"),
        (f'[keys.one]\nhash="{HASH}"\nowner="o"\ntokens_per_minute=true', "tokens_per_minute must be"),
        (f'[keys.one]\nhash="{HASH}"\nowner="o"\nadmin="yes"', "admin must be"),
        (f'[keys.one]\nhash="{HASH}"\nowner="o"\nexpires="tomorrow"', "expires must be a date"),
        (f'[keys.one]\nhash="{HASH}"\nowner="o"\ntoken_per_minute=1', "'token_per_minute' is unknown"),
        (
            f'[keys.one]\nhash="{HASH}"\nowner="o"\n[keys.two]\nhash="{HASH}"\nowner="o"',
            "have the same hash",
        ),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(text: str, said: str, path: Path) -> None:
    with pytest.raises(KeysFileError, match=said):
        parse(text.encode(), path)


@given(st.text(st.sampled_from("ab*?.-"), min_size=1, max_size=12), st.text(st.sampled_from("ab.-\n"), max_size=12))
@settings(max_examples=80, deadline=None)
def test_patterns_match_as_a_shell_matches_file_names(pattern: str, name: str) -> None:
    assert Key("k", HASH, "o", (pattern,)).allows(name) == fnmatchcase(name, pattern)


def test_no_pattern_allows_nothing_and_long_patterns_take_linear_time() -> None:
    assert not Key("k", HASH, "o", ()).allows("")
    assert not Key("k", HASH, "o", ("a*" * 120 + "b",)).allows("a" * 100_000)


def test_an_entry_expires(path: Path) -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    added(path, expires=moment)
    key = KeyStore(path).keys["one"]
    assert key.expired(moment) and not key.expired(moment - timedelta(seconds=1))
    plain = parse(f'[keys.one]\nhash="{HASH}"\nowner="o"\nexpires=2030-01-01'.encode(), path)["one"]
    assert plain.expires == moment


def test_comments_and_other_keys_survive_changes(path: Path) -> None:
    path.write_text(
        f'# ours\n[keys.old]  # since spring\nhash = "{HASH}"\nowner = "o"\nmodels = [\n  "a",\n  "b",\n]\n\n'
        f'[ keys . "gone" ]\nhash = "{hash_of("g")}"\nowner = "o" # [keys.fake]\nmodels = [\n"x" ]\n'
    )
    path.chmod(0o640)
    added(path, "new")
    edit_keys_file.revoke(path, "gone")
    text = path.read_text()
    assert text.startswith("# ours\n[keys.old]  # since spring\n") and "gone" not in text
    assert list(tomllib.loads(text)["keys"]) == ["old", "new"]
    assert path.stat().st_mode & 0o777 == 0o640, "who may read it stays as it was"


def test_an_entry_that_is_no_table_of_its_own_is_left_to_an_editor(path: Path) -> None:
    path.write_text(f'keys.one = {{hash = "{HASH}", owner = "o"}}\n')
    path.chmod(0o600)
    before = path.read_bytes()
    with pytest.raises(KeysFileError, match="editor"):
        edit_keys_file.revoke(path, "one")
    assert path.read_bytes() == before


def test_changes_at_one_time_lose_nothing(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = dict(zip(map(str, range(24)), pool.map(lambda name: added(path, str(name)), range(24)), strict=True))
        list(pool.map(lambda name: edit_keys_file.revoke(path, str(name)), range(0, 24, 2)))
    book = KeyStore(path)
    assert {name for name, key in keys.items() if book.find(key)} == {str(name) for name in range(1, 24, 2)}
    assert sorted(os.listdir(path.parent)) == ["keys.toml", "keys.toml.lock"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "keys.toml"
    link.symlink_to(tmp_path / "real" / "keys.toml")
    key = added(link)
    assert link.is_symlink() and KeyStore(link).find(key)


def test_the_example_of_the_page_is_a_keys_file(path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "serving.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    key = parse(example.encode(), path)["search-1"]
    assert key.models == ("llama", "sql-*") and None not in (
        key.tokens_per_day,
        key.max_tokens,
        key.created,
        key.expires,
    )


def test_the_commands(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--owner", "search", "--model", "llama", "sql-*", "--requests-per-minute", "60", "--expires", "90d"]
    assert main(["keys", "http", "add", str(path), "--name", "search-1", *asked]) == 0
    said = capsys.readouterr()
    key = said.out.strip()
    assert said.out == key + "\n" and "shown only now" in said.err and key not in said.err
    found = KeyStore(path).find(key)
    assert found is not None and found.models == ("llama", "sql-*") and found.requests_per_minute == 60
    assert found.expires is not None and found.created is not None
    assert found.expires - found.created == timedelta(days=90)

    assert main(["keys", "http", "add", str(path), "--owner", "team"]) == 0, "a name is made where none is given"
    assert main(["keys", "http", "list", str(path)]) == 0
    listed = capsys.readouterr().out
    assert "search-1" in listed and "sql-*" in listed and "60 requests/min" in listed and "team-" in listed

    assert main(["keys", "http", "revoke", str(path), "search-1"]) == 0
    assert KeyStore(path).find(key) is None
    for wrong, said_of in (
        (["keys", "http", "revoke", str(path), "search-1"], "has no key 'search-1'"),
        (["keys", "http", "revoke", str(path) + "x", "search-1"], "no such file"),
        (["keys", "http", "add", str(path), "--owner", "a b"], "owner"),
        (["keys", "http", "add", str(path), "--owner", "a", "--model", "(x"], "models"),
    ):
        capsys.readouterr()
        assert main(wrong) == 2
        assert said_of in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["keys", "http", "add", str(path), "--owner", "a", "--expires", "soon"])
    assert "90d" in capsys.readouterr().err


def test_a_key_is_revoked_by_its_name_or_by_an_owner_who_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    for owner in ("ops", "ops", "web"):
        assert main(["keys", "http", "add", str(path), "--owner", owner]) == 0
    names = {owner: [name for name, key in parse(path.read_bytes(), path).items() if key.owner == owner]
             for owner in ("ops", "web")}  # fmt: skip
    capsys.readouterr()
    for asked, words in (
        ("ops", ["owner 'ops' has 2 keys; give one of their names", *names["ops"]]),
        ("web-1", ["has no key 'web-1'", f"{names['web'][0]} of web", f"{names['ops'][1]} of ops"]),
    ):
        assert main(["keys", "http", "revoke", str(path), asked]) == 2
        said = capsys.readouterr().err
        assert all(word in said for word in words), said
    assert main(["keys", "http", "revoke", str(path), "web"]) == 0
    assert main(["keys", "http", "revoke", str(path), names["ops"][0]]) == 0
    assert main(["keys", "http", "revoke", str(path), "ops"]) == 0, "of one key the owner is enough"
    assert parse(path.read_bytes(), path) == {}
    capsys.readouterr()
    assert main(["keys", "http", "revoke", str(path), "ops"]) == 2 and "it has no keys" in capsys.readouterr().err
