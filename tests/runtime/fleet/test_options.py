"""fleet.toml, the adapters' root, the number of engines, the token's file and the manifests: without a Ray."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.fleet import adapter_root
from sidestream.runtime.fleet.adapter_root import AdapterRoot
from sidestream.runtime.fleet.cluster import secure
from sidestream.runtime.fleet.options import options_of, read_options, serve_settings
from sidestream.runtime.fleet.this_machine import ThisMachine
from sidestream.runtime.gateway.contracts import GatewayError
from support.kuberay_schema import problems

DOCS = Path(__file__).parents[3] / "docs"
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"max-replica": 3}, "there is no key 'max-replica'; did you mean 'max-replicas'?"),
        ({"min_replicas": 3}, "max-replicas = 1 is below min-replicas = 3"),
        ({"min-replicas": -1}, r"Expected `int` >= 0 - at `\$.min-replicas`"),
        ({"engine": {"max-num-seq": 3}}, "there is no option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"engine": {"max-num-seqs": 0}}, "max_num_seqs=0 must be an integer"),
        ({"model": "nowhere"}, "it has no config.json"),
        ({"host": "0.0.0.0"}, "can be reached from other machines"),
        ({"gpus": 0, "engine": {"device": "cuda"}}, "leaves engines no GPU"),
        ({"gpus": 1, "engine": {"tensor-parallel-size": 2}}, "tensor-parallel-size = 2 uses 2; leave gpus out"),
        ({"adapters-root": "nowhere"}, "nowhere"),
        ({"adapters-root": "nonsense://x"}, "Protocol not known: nonsense"),
        ({"engine-keys": "nowhere"}, "make keys with `sidestream keygen DIR`"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, says):
    with pytest.raises((ValueError, OSError), match=says):
        options_of(content, tmp_path, "fleet.toml")


def test_a_file_is_read_with_paths_of_its_directory(tmp_path):
    (tmp_path / "fleet.toml").write_text(
        'max-replicas = 3\nidle_seconds = 9\n[engine]\nmax-num-seqs = 4\n[lora-modules]\nnew = "adapters/new"\n'
    )
    options = read_options(tmp_path / "fleet.toml")
    assert (options.max_replicas, options.idle_seconds) == (3, 9.0)
    settings = serve_settings(options)
    assert settings.llm == {"device": "cpu", "max_num_seqs": 4}
    assert settings.adapters["new"] == str(tmp_path / "adapters" / "new") and "pirate" in settings.adapters
    command = [sys.executable, "-m", "sidestream.tools.cli", "deploy", str(tmp_path / "fleet.toml"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.endswith("is in order\n")
    (tmp_path / "fleet.toml").write_text("max-replicas = ")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "is no TOML file" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.fixture
def objects():
    """A store without directories, as S3 is one: keys and bytes."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


def test_objects_of_a_store_come_change_and_go(objects, tmp_path):
    root = AdapterRoot("memory://bucket/adapters")
    assert root.look() == {} and root.remote
    pirate, shout = DEMO_MODEL / "adapters" / "pirate", DEMO_MODEL / "adapters" / "shout"
    objects.put(str(pirate), "/bucket/adapters/pirate", recursive=True)
    found = root.look()
    assert list(found) == ["pirate"] and found["pirate"].rank > 0 and root.look() == found
    fetched = adapter_root.fetch(root.place, found["pirate"].path, found["pirate"].version, tmp_path)
    for each in fetched.iterdir():
        assert each.read_bytes() == (pirate / each.name).read_bytes()
    objects.put(str(shout / adapter_root.WEIGHTS), f"/bucket/adapters/pirate/{adapter_root.WEIGHTS}")
    changed = root.look()["pirate"]
    assert changed.version != found["pirate"].version
    again = adapter_root.fetch(root.place, changed.path, changed.version, tmp_path)
    assert (again / adapter_root.WEIGHTS).read_bytes() == (shout / adapter_root.WEIGHTS).read_bytes()
    objects.rm("/bucket/adapters/pirate", recursive=True)
    assert root.look() == {}
    with pytest.raises(FileNotFoundError):
        adapter_root.fetch(root.place, changed.path, "0" * 64, tmp_path)


def test_hostile_objects_of_a_store_are_no_adapters(objects, tmp_path, monkeypatch):
    def put(folder, config=b'{"r": 8}', weights=b"weights"):
        objects.pipe_file(f"/bucket/adapters/{folder}/{adapter_root.CONFIG}", config)
        objects.pipe_file(f"/bucket/adapters/{folder}/{adapter_root.WEIGHTS}", weights)

    for name in (".hidden", "two words", "x" * 200, "deep/inside", "-option", "new\nline"):
        put(name)
    for key in ("/bucket/adapters/../up", "/bucket/adapters/..", "/bucket/elsewhere", "/bucket/adapters"):
        for file in (adapter_root.CONFIG, adapter_root.WEIGHTS):
            objects.store[f"{key}/{file}"] = objects.store[f"/bucket/adapters/.hidden/{file}"]
    put("empty", weights=b"")
    put("huge", config=b" " * (adapter_root.MAX_CONFIG_BYTES + 1))
    root = AdapterRoot("memory://bucket/adapters")
    assert root.look() == {}
    nested = b"[" * 100_000
    put("nested", config=nested)
    put("lies", config=b'{"r": "8"}')
    put("bytes", config=b"\xff\xfe")
    found = root.look()
    assert sorted(found) == ["bytes", "lies", "nested"] and {offer.rank for offer in found.values()} == {0}
    # more comes than the store had said
    monkeypatch.setattr(adapter_root, "MAX_WEIGHTS_BYTES", 3)
    read = []
    opened = objects.open
    monkeypatch.setattr(type(objects), "open", lambda self, *given: _Counted(opened(*given), read))
    with pytest.raises(ValueError, match="of adapter 'lies' has more than 3 bytes"):
        adapter_root.fetch(root.place, found["lies"].path, found["lies"].version, tmp_path)
    assert sum(read) == len(b'{"r": "8"}') + 4 and list(tmp_path.iterdir()) == []

    def broken(self, *given, **named):
        raise RuntimeError("no credentials")

    monkeypatch.setattr(type(objects), "find", broken)
    with pytest.raises(OSError, match="memory://bucket/adapters: RuntimeError: no credentials"):
        root.look()


class _Counted:
    """A file whose reads are counted."""

    def __init__(self, file, read):
        self._file, self._read = file, read

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        self._file.close()

    def read(self, count):
        piece = self._file.read(count)
        self._read.append(len(piece))
        return piece


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_folders_of_a_root_come_change_and_go(tmp_path, scheme):
    place = tmp_path / "root"
    place.mkdir()
    root = AdapterRoot(f"{scheme}{place}")
    assert root.look() == {} and root.remote == bool(scheme)
    shutil.copytree(DEMO_MODEL / "adapters" / "pirate", place / "pirate")
    (place / ".hidden").mkdir()
    (place / "empty").mkdir()
    (place / "file").write_text("x")
    found = root.look()
    assert list(found) == ["pirate"] and found["pirate"].rank > 0
    assert root.look() == found
    weights = place / "pirate" / "adapter_model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert root.look()["pirate"].version != found["pirate"].version
    shutil.rmtree(place / "pirate")
    assert root.look() == {}


def test_a_remote_adapter_is_fetched_once_and_only_from_the_root(tmp_path, monkeypatch):
    place, into = tmp_path / "root", tmp_path / "into"
    shutil.copytree(DEMO_MODEL / "adapters" / "pirate", place / "pirate")
    root = AdapterRoot(f"file://{place}")
    offer = root.look()["pirate"]
    found = adapter_root.fetch(root.place, offer.path, offer.version, into)
    assert found.name == "pirate" and found.is_relative_to(into)
    assert (found / "adapter_model.safetensors").read_bytes() == (
        place / "pirate" / "adapter_model.safetensors"
    ).read_bytes()
    shutil.rmtree(place / "pirate")
    assert adapter_root.fetch(root.place, offer.path, offer.version, into) == found
    for folder, version in (
        (str(tmp_path), offer.version),
        (f"{place}/../root/pirate", offer.version),
        (offer.path, ".."),
    ):
        with pytest.raises(ValueError, match="does not lie in the fleet's root"):
            adapter_root.fetch(root.place, folder, version, into)
    shutil.copytree(DEMO_MODEL / "adapters" / "pirate", place / "pirate")
    monkeypatch.setattr(adapter_root, "MAX_WEIGHTS_BYTES", 100)
    with pytest.raises(ValueError, match="has more than 100 bytes"):
        adapter_root.fetch(root.place, offer.path, "0" * 64, into)
    assert sorted(path.name for path in into.iterdir()) == [offer.version]
    assert root.look() == {}, "what is too large is no adapter"


def test_the_tokens_file_is_ours_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "made" / "token"))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    secure()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    token = (tmp_path / "made" / "token").read_text()
    assert len(token) == 64 and (tmp_path / "made" / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "made" / "token").chmod(0o644)
    secure()
    assert (tmp_path / "made" / "token").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "made" / "token").read_text() == token


def test_importing_the_fleet_imports_no_ray_and_no_torch():
    program = (
        "import sys, sidestream.runtime.fleet, sidestream.runtime.fleet.options, sidestream.tools.cli;"
        "print([name for name in ('ray', 'torch') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


@needs_ray
def test_an_engine_owns_a_gpu_for_each_of_its_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    secure()
    import ray
    from sidestream.runtime.fleet.application import lacking, resources

    def gpus(cluster, content):
        monkeypatch.setattr(ray, "cluster_resources", lambda: cluster)
        return resources(options_of({"model": str(DEMO_MODEL)} | content, tmp_path, "fleet.toml"))["num_gpus"]

    two = {"tensor-parallel-size": 2}
    assert gpus({"GPU": 8.0}, {}) == 1 and gpus({"GPU": 8.0}, {"engine": two}) == 2
    assert gpus({"CPU": 8.0}, {"engine": two}) == 0 and gpus({"GPU": 8.0}, {"engine": two | {"device": "cpu"}}) == 0
    assert gpus({"CPU": 8.0}, {"engine": two | {"device": "cuda"}}) == 2, "nodes with GPUs come when they are asked for"
    assert gpus({"CPU": 8.0}, {"gpus": 2, "engine": two}) == 2

    def said(*nodes):
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": each} for each in nodes])
        return lacking(options_of({"model": str(DEMO_MODEL), "gpus": 2, "engine": two}, tmp_path, "fleet.toml"))

    assert said({"CPU": 8.0}, {"CPU": 8.0, "GPU": 4.0}) == ""
    assert said({"CPU": 8.0, "GPU": 1.0}, {"CPU": 0.5, "GPU": 1.0}).startswith("no node of this Ray has 2 GPUs for an")
    assert said().startswith("no node of this Ray has 2 GPUs and 1 CPUs for an engine")


@needs_ray
def test_serve_run_takes_the_application(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    secure()
    from ray.serve import Application
    from sidestream.runtime.fleet import app

    (tmp_path / "fleet.toml").write_text("max-replicas = 3\n")
    assert isinstance(app({}), Application) and isinstance(app({"fleet": str(tmp_path / "fleet.toml")}), Application)
    with pytest.raises(ValueError, match="there is no argument 'flet'; give fleet=FILE"):
        app({"flet": "fleet.toml"})
    (tmp_path / "fleet.toml").write_text("max-replica = 3\n")
    with pytest.raises(ValueError, match="did you mean 'max-replicas'"):
        app({"fleet": str(tmp_path / "fleet.toml")})


@needs_ray
def test_files_of_engines_that_ended_go(tmp_path):
    from sidestream.runtime.fleet.private_address import leave, sweep
    from sidestream.runtime.wire.addresses import AddressLock, parse

    def made(name):
        address = f"ipc://{tmp_path}/fleet-{name}.sock"
        (tmp_path / f"fleet-{name}.sock").touch()
        return address, AddressLock(parse(address))

    (alive, held), (_, killed), (ended, over) = made("alive"), made("killed"), made("ended")
    killed.release()
    over.release()
    (tmp_path / "engine.sock.lock").touch()
    leave(ended)
    sweep(alive)
    names = ["engine.sock.lock", "fleet-alive.sock", "fleet-alive.sock.lock"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "fleet-killed.sock", "fleet-killed.sock.lock"]
    sweep(alive, old_seconds=0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    held.release()


def test_a_fleet_without_keys_serves_its_own_machine_only():
    door = ThisMachine()
    assert all(door.identify(None, host) for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"))
    for host in ("192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1", "", "localhost"):
        with pytest.raises(GatewayError, match="no keys, so it serves its own machine only") as refused:
            door.identify(None, host)
        assert refused.value.status == 403


@needs_ray
def test_engines_are_wanted_by_requests_and_tokens(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    secure()
    from sidestream.runtime.fleet.policy import LoadPolicy

    def wanted(policy, requests, tokens, queued=0.0):
        metrics = {"requests": dict(enumerate(requests)), "tokens": dict(enumerate(tokens))}
        return policy(SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=queued))[0]

    assert wanted(LoadPolicy(10, None), [0, 0], [1e9, 0]) == 0
    assert wanted(LoadPolicy(10, None), [20, 5], [0, 0]) == 3
    assert wanted(LoadPolicy(10, 1000), [1, 0], [3500, 100]) == 4
    assert wanted(LoadPolicy(10, 1000), [], [], queued=0.3) == 1


@needs_ray
@pytest.mark.parametrize("name", ["rayservice.yaml", "rayservice_one_host.yaml"])
def test_manifests_say_what_ray_and_the_fleet_take(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    secure()
    import tomllib

    import yaml
    from ray.serve.schema import ServeDeploySchema

    config, service = yaml.safe_load_all((DOCS / "deploy" / name).read_text())
    assert problems(service) == [], "KubeRay's schema"
    assert (config["apiVersion"], config["kind"], set(config)) == ("v1", "ConfigMap", {*service} - {"spec"} | {"data"})
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    told = ServeDeploySchema(**yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert told.applications[0].import_path == "sidestream.runtime.fleet:app"
    mounts = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert str(Path(told.applications[0].args["fleet"]).parent) in {mount["mountPath"] for mount in mounts}
    fleet = tomllib.loads(config["data"]["fleet.toml"])
    # what lies on volumes there
    keygen = [sys.executable, "-m", "sidestream.tools.cli"]
    subprocess.run([*keygen, "keygen", str(tmp_path / "engine"), "--client", "gateway"], check=True)
    subprocess.run([*keygen, "keys", "add", str(tmp_path / "keys.toml"), "--owner", "me"], check=True)
    fleet |= {"model": str(DEMO_MODEL), "keys": str(tmp_path / "keys.toml")}
    if "engine-keys" in fleet:
        fleet["engine-keys"] = str(tmp_path / "engine")
    options = options_of(fleet, tmp_path, name)
    assert options.gpus == 1 and told.http_options.host == options.host and told.http_options.port == options.port
