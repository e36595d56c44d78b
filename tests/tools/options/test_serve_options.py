"""What `sidestream serve` makes of its flags and of a TOML file."""

import json

import pytest
from sidestream.runtime.protocol.addresses import AddressError
from sidestream.tools import cli
from sidestream.tools.commands.serve import front_of, settings_of


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


def test_adapters_of_a_directory(model, tmp_path):
    root = tmp_path / "adapters"
    for name, rank in (("b", 64), ("c", 9)):
        (root / name).mkdir()
        (root / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
        (root / name / "adapter_model.safetensors").write_bytes(b"x")
    (root / "no weights").mkdir()
    found = settings(str(model), "--lora-modules-from", str(root))
    assert found.adapters == {name: f"{root}/{name}" for name in "bc"} and found.adapters_folder == str(root)
    assert found.adapter_roots == [str(root)] and found.is_in_folder(found.adapters["b"])
    sizes = {"max_loras": 8, "max_lora_rank": 64, "lora_target_modules": ["all"]}
    assert found.llm == settings(str(model)).llm | sizes, "later adapters have room, too"
    both = settings(str(model), "--lora-modules-from", str(root), "--lora-modules", f"x={root}/a", "--max-loras", "3")
    assert set(both.adapters) == {"x", "b", "c"} and both.llm["max_loras"] == 3
    assert not both.is_in_folder(str(tmp_path / "elsewhere" / "a")) and not settings(str(model)).is_in_folder("/x")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora-modules-from", "ROOT/nowhere"], "is not a directory"),
        (["--lora-modules-from", "ROOT", "--lora-modules", "b=ROOT/a"], "'b' is in --lora-modules and in"),
        (["--lora-modules-from", "ROOT", "--bind", "tcp://127.0.0.1:5757"], "add --allow-adapter-loading"),
        (["--resolve-adapters"], "add --adapter-root DIR"),
        (
            ["--resolve-adapters", "--adapter-root", "ROOT", "--bind", "tcp://127.0.0.1:5757"],
            "--resolve-adapters loads adapters while the server runs.* add --allow-adapter-loading",
        ),
        (["--lora-modules", "a=ROOT/a", "--served-model-name", "m", "a"], "'a' names the model and an adapter"),
        (["--served-model-name", "m", ""], "--served-model-name must not be empty"),
    ],
)
def test_contradictory_adapters(model, tmp_path, flags, words):
    root = tmp_path / "adapters"
    (root / "b").mkdir()
    (root / "b" / "adapter_config.json").write_text("{}")
    (root / "b" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=words):
        settings(str(model), *(flag.replace("ROOT", str(root)) for flag in flags))


@pytest.mark.parametrize("flags", [["--lora-modules-from", "ROOT"], ["--resolve-adapters", "--adapter-root", "ROOT"]])
def test_adapters_that_the_gateway_loads_need_http(model, tmp_path, capsys, flags):
    arguments = [str(model), "--no-http", *(flag.replace("ROOT", str(tmp_path / "adapters")) for flag in flags)]
    assert cli.main(["serve", *arguments, "--bind", f"ipc://{tmp_path}/e.sock"]) == 2
    assert f"{flags[0]} needs HTTP" in capsys.readouterr().err


def test_adapters_that_are_resolved_later_have_slots(model, tmp_path):
    found = settings(str(model), "--resolve-adapters", "--adapter-root", f"{tmp_path}/adapters", "--max-loras", "3")
    sizes = {"max_loras": 3, "max_lora_rank": 16, "lora_target_modules": ["all"]}
    assert found.llm == settings(str(model)).llm | sizes


def test_adapters_as_vllm_writes_them(model, tmp_path, monkeypatch):
    path = f"{tmp_path}/adapters/a"
    one = json.dumps({"name": "x", "path": path, "base_model_name": "base"})
    two = json.dumps([{"name": "y", "path": path}, {"name": "z", "path": path}])
    found = settings(str(model), "--lora-modules", one, two, "--lora-modules", f"w={path}")
    assert found.adapters == dict.fromkeys("xyzw", path)
    file = tmp_path / "server.toml"
    file.write_text(f"lora-modules = ['{one}', '{two}', 'w={path}']")
    assert settings(str(model), "--config", str(file)).adapters == found.adapters
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--org--sql" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    assert settings(str(model), "--lora-modules", "sql=org/sql").adapters == {"sql": str(snapshot)}
    with pytest.raises(ValueError, match=r"nothing is downloaded.*hf download org/other"):
        settings(str(model), "--lora-modules", "sql=org/other")


@pytest.mark.parametrize("text", ["[1]", "{", '[{"name": "x"}]', '{"name": "a b", "path": "c"}', "[[]]", '"x"'])
def test_adapters_that_are_not_readable(model, text, capsys):
    with pytest.raises(SystemExit):
        settings(str(model), "--lora-modules", text)
    assert "is not" in capsys.readouterr().err


def test_cascade_attention_is_on_unless_it_is_switched_off(model):
    assert "cascade_attention" not in settings(str(model)).llm
    assert settings(str(model), "--cascade-attention").llm["cascade_attention"] is True
    assert settings(str(model), "--no-cascade-attention").llm["cascade_attention"] is False


def test_several_names_of_the_model(model, tmp_path):
    options = cli.build_parser().parse_args(["serve", str(model), "--port", "0", "--served-model-name", "m", "n", "o"])
    found = settings_of(options)
    assert found.served_model_name == "m"
    front = front_of(options, found)
    assert front._settings(["ipc:///x"]).model_aliases == ["n", "o"]
    front.close()


def test_a_chat_template_is_read_at_the_start(model, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert settings(str(model)).chat_template is None
    assert settings(str(model), "--chat-template", str(tmp_path / "own.jinja")).chat_template == "{{ messages }}"
    with pytest.raises(ValueError, match=r"no\.jinja cannot be read: No such file"):
        settings(str(model), "--chat-template", str(tmp_path / "no.jinja"))


def test_default_variables_of_the_chat_template(model, tmp_path):
    def read(*arguments):
        options = cli.build_parser().parse_args(["serve", str(model), "--port", "0", *arguments])
        front = front_of(options, settings_of(options))
        front.close()
        return front._settings(["ipc:///x"]).template_variables

    assert read() == {}
    flag = "--default-chat-template-kwargs"
    assert read(flag, '{"enable_thinking": false}') == read(f"{flag}.enable_thinking", "false")
    (tmp_path / "server.toml").write_text('default-chat-template-kwargs = \'{"mood": "calm"}\'')
    assert read("--config", str(tmp_path / "server.toml")) == {"mood": "calm"}
    with pytest.raises(ValueError, match=f"{flag} must not contain 'tools'"):
        read(flag, '{"tools": []}')


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
