"""What `sidestream serve` makes of its flags and of a TOML file."""

import json

import pytest
from sidestream.runtime.protocol.addresses import AddressError
from sidestream.tools import cli
from sidestream.tools.commands.serve import settings_of


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "adapters" / "a").mkdir(parents=True)
    (tmp_path / "adapters" / "a" / "adapter_config.json").write_text("{}")
    return tmp_path / "model"


def settings(*arguments: str):
    return settings_of(cli.build_parser().parse_args(["serve", *arguments]))


def test_flags(model, tmp_path):
    found = settings(
        str(model),
        "--lora-modules",
        f"x={tmp_path}/adapters/a",
        "--bind",
        "tcp://127.0.0.1:5757",
        "--max-num-seqs",
        "9",
        "--drain-seconds",
        "3",
    )
    assert (found.model, found.adapters, found.bind) == (
        str(model),
        {"x": f"{tmp_path}/adapters/a"},
        "tcp://127.0.0.1:5757",
    )
    assert found.llm["max_num_seqs"] == 9 and found.drain_seconds == 3 and found.served_model_name == "model"
    assert found.admin is False, "over tcp, adapters are loaded only when that was asked for"
    assert found.adapter_roots == [f"{tmp_path}/adapters"]
    assert settings(str(model)).admin is True and settings(str(model), "--no-allow-adapter-loading").admin is False
    assert found.restart is True and found.step_timeout is None
    assert settings(str(model), "--no-restart").restart is False
    json.dumps(found.llm)


def test_a_chat_template_is_read_at_the_start(model, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert settings(str(model)).chat_template is None
    assert settings(str(model), "--chat-template", str(tmp_path / "own.jinja")).chat_template == "{{ messages }}"
    with pytest.raises(ValueError, match=r"no\.jinja cannot be read: No such file"):
        settings(str(model), "--chat-template", str(tmp_path / "no.jinja"))


def test_a_file_fills_in_what_the_command_line_leaves_open(model, tmp_path):
    file = tmp_path / "server.toml"
    file.write_text(
        f'model = "{model}"\nmax-num-seqs = 5\nmax_model_len = 99\nrestart = false\nstep-timeout = 90\n'
        'drain-seconds = 1.5\ndisable-pass = ["quantize_kv"]\n'
        f'[lora-modules]\nx = "{tmp_path}/adapters/a"\n'
    )
    for arguments in (["--config", str(file), "--max-num-seqs", "6"], ["--max-num-seqs", "6", "--config", str(file)]):
        found = settings(*arguments)
        assert found.model == str(model) and found.adapters == {"x": f"{tmp_path}/adapters/a"}
        assert (
            found.llm["max_num_seqs"] == 6
            and found.llm["max_model_len"] == 99
            and found.llm["disable_passes"] == ["quantize_kv"]
        )
        assert found.restart is False and found.drain_seconds == 1.5 and found.step_timeout == 90.0


@pytest.mark.parametrize(
    ("line", "flags", "name", "value"),
    [
        ('precision = "fp8"', ["--precision", "int8"], "precision", "int8"),
        ("seed = 7", ["--seed=0"], "seed", 0),
        ('kv-cache-dtype = "bf16"', ["--kv-cache-dtype", "auto"], "kv_cache_dtype", "auto"),
        ('disable-pass = ["quantize_kv"]', ["--disable-pass", "fuse_quantize"], "disable_passes", ["fuse_quantize"]),
    ],
)
def test_a_flag_that_equals_its_default_wins_over_the_file(model, tmp_path, line, flags, name, value):
    file = tmp_path / "server.toml"
    file.write_text(line)
    assert settings(str(model), "--config", str(file)).llm[name] != value
    for arguments in ([*flags, "--config", str(file)], ["--config", str(file), *flags]):
        assert settings(str(model), *arguments).llm[name] == value


def test_the_model_of_the_command_line_wins_over_the_files(model, tmp_path):
    file = tmp_path / "server.toml"
    file.write_text('model = "elsewhere"')
    assert settings(str(model), "--config", str(file)).model == str(model)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("max-num-seq = 3", "did you mean max-num-seqs"),
        ("max-num-seqs = 0", "at least 1"),
        ("max-num-seqs = true", "not what this flag takes"),
        ("restart = 1", "true or false"),
        ('precision = "fp4"', "fp4"),
        ("= 3", "not a TOML file"),
        ('[lora-modules]\n"a b" = "x"', "NAME=DIRECTORY"),
    ],
)
def test_a_file_is_checked_like_the_command_line(model, tmp_path, capsys, line, words):
    file = tmp_path / "bad.toml"
    file.write_text(line)
    with pytest.raises(SystemExit):
        settings(str(model), "--config", str(file))
    assert words in capsys.readouterr().err


def test_addresses_that_others_could_reach_need_keys(model, tmp_path):
    from sidestream.runtime.server.supervisor import Supervisor

    with pytest.raises(AddressError, match="keys curve"):
        Supervisor(settings(str(model), "--bind", "tcp://0.0.0.0:5757"))
    with pytest.raises(AddressError, match="absolute path"):
        settings(str(model), "--bind", "ipc://relative.sock")
    tmp_path.chmod(0o755)
    with pytest.raises(AddressError, match="open to other users"):
        Supervisor(settings(str(model), "--bind", f"ipc://{tmp_path}/e.sock"))
