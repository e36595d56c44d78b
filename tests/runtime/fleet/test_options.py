"""fleet.toml, autoscaling, the token file and the manifests, without a Ray cluster."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.fleet.cluster import secure
from sidestream.runtime.fleet.options import options_of, read_options, serve_settings
from sidestream.runtime.gateway.interfaces import GatewayError
from support.kuberay_schema import problems

DOCS = Path(__file__).parents[3] / "docs"
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"max-replica": 3}, "unknown key 'max-replica'; did you mean 'max-replicas'?"),
        ({"min_replicas": 3}, "max-replicas = 1 is below min-replicas = 3"),
        ({"min-replicas": -1}, r"Expected `int` >= 0 - at `\$.min-replicas`"),
        ({"engine": {"max-num-seq": 3}}, "there is no option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"engine": {"max-num-seqs": 0}}, "max_num_seqs=0 must be an integer"),
        ({"model": "nowhere"}, "it has no config.json"),
        ({"host": "0.0.0.0"}, "can be reached from other machines"),
        ({"gpus": 0, "engine": {"device": "cuda"}}, "gives engines no GPU"),
        ({"gpus": 1, "engine": {"tensor-parallel-size": 2}}, "tensor-parallel-size = 2 uses 2; omit gpus"),
        ({"adapters-root": "nowhere"}, "nowhere"),
        ({"adapters-root": "nonsense://x"}, "Protocol not known: nonsense"),
        ({"engine-keys": "nowhere"}, "make keys with `sidestream keys curve DIR`"),
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
    command = [sys.executable, "-m", "sidestream.tools.cli", "fleet", "deploy", str(tmp_path / "fleet.toml"), "--check"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.endswith("is in order\n")
    (tmp_path / "fleet.toml").write_text("max-replicas = ")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "is not a TOML file" in done.stderr and len(done.stderr.splitlines()) == 1


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
def test_an_engine_owns_a_gpu_for_each_of_its_ranks(secured, monkeypatch, tmp_path):
    import ray
    from sidestream.runtime.fleet.application import missing_resources, resources

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
        return missing_resources(
            options_of({"model": str(DEMO_MODEL), "gpus": 2, "engine": two}, tmp_path, "fleet.toml")
        )

    assert said({"CPU": 8.0}, {"CPU": 8.0, "GPU": 4.0}) == ""
    assert said({"CPU": 8.0, "GPU": 1.0}, {"CPU": 0.5, "GPU": 1.0}).startswith("no node of this Ray has 2 GPUs for an")
    assert said().startswith("no node of this Ray has 2 GPUs and 1 CPUs for an engine")


@needs_ray
def test_serve_run_takes_the_application(secured, tmp_path):
    from ray.serve import Application
    from sidestream.runtime.fleet import app

    (tmp_path / "fleet.toml").write_text("max-replicas = 3\n")
    assert isinstance(app({}), Application) and isinstance(app({"fleet": str(tmp_path / "fleet.toml")}), Application)
    with pytest.raises(ValueError, match="unknown argument 'flet'; give fleet=FILE"):
        app({"flet": "fleet.toml"})
    (tmp_path / "fleet.toml").write_text("max-replica = 3\n")
    with pytest.raises(ValueError, match="did you mean 'max-replicas'"):
        app({"fleet": str(tmp_path / "fleet.toml")})


@needs_ray
def test_a_fleet_that_does_not_come_up_says_why(secured, monkeypatch, tmp_path):
    from ray import serve
    from sidestream.runtime.fleet.application import deploy

    def run(*given, **named):
        raise RuntimeError("Failed to update the deployments ['engine'].")

    def deployments(**messages):
        each = {
            name: SimpleNamespace(status=SimpleNamespace(value=status), message=message)
            for name, (status, message) in messages.items()
        }
        application = SimpleNamespace(deployments=each)
        monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"sidestream": application}))

    monkeypatch.setattr(serve, "start", lambda **named: None)
    monkeypatch.setattr(serve, "run", run)
    stack = 'It failed 3 times.\n  File "x.py", line 1\nRuntimeError: max_num_seqs=9 is more than there is memory for\n'
    deployments(ingress=("HEALTHY", ""), engine=("DEPLOY_FAILED", stack))
    with pytest.raises(ValueError, match="'sidestream' did not start: max_num_seqs=9 is more than"):
        deploy(options_of({}, tmp_path, "fleet.toml"))
    deployments(ingress=("HEALTHY", ""), engine=("DEPLOY_FAILED", ""))
    with pytest.raises(ValueError, match="did not start: Failed to update the deployments"):
        deploy(options_of({}, tmp_path, "fleet.toml"))


@needs_ray
def test_files_of_engines_that_ended_go(secured, tmp_path):
    from sidestream.runtime.fleet.engine import remove_files, remove_stale_files
    from sidestream.runtime.protocol.addresses import AddressLock, parse

    def made(name):
        address = f"ipc://{tmp_path}/fleet-{name}.sock"
        (tmp_path / f"fleet-{name}.sock").touch()
        return address, AddressLock(parse(address))

    (alive, held), (_, killed), (ended, over) = made("alive"), made("killed"), made("ended")
    killed.release()
    over.release()
    (tmp_path / "engine.sock.lock").touch()
    remove_files(ended)
    remove_stale_files(alive)
    names = ["engine.sock.lock", "fleet-alive.sock", "fleet-alive.sock.lock"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "fleet-killed.sock", "fleet-killed.sock.lock"]
    remove_stale_files(alive, old_seconds=0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    held.release()


@needs_ray
def test_a_fleet_without_keys_serves_its_own_machine_only(secured):
    from sidestream.runtime.fleet.loopback_only import LoopbackOnly

    door = LoopbackOnly()
    assert all(door.identify(None, host) for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"))
    for host in ("192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1", "", "localhost"):
        with pytest.raises(GatewayError, match="no keys, so it serves only its own machine") as refused:
            door.identify(None, host)
        assert refused.value.status == 403


@needs_ray
def test_engines_are_wanted_by_requests_and_tokens(secured):
    from sidestream.runtime.fleet.policies import LoadPolicy

    def wanted(policy, requests, tokens, queued=0.0):
        metrics = {"requests": dict(enumerate(requests)), "tokens": dict(enumerate(tokens))}
        return policy(SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=queued))[0]

    assert wanted(LoadPolicy(10, None), [0, 0], [1e9, 0]) == 0
    assert wanted(LoadPolicy(10, None), [20, 5], [0, 0]) == 3
    assert wanted(LoadPolicy(10, 1000), [1, 0], [3500, 100]) == 4
    assert wanted(LoadPolicy(10, 1000), [], [], queued=0.3) == 1


@needs_ray
@pytest.mark.parametrize("name", ["rayservice.yaml", "rayservice_one_host.yaml"])
def test_manifests_say_what_ray_and_the_fleet_take(secured, name, tmp_path):
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
    subprocess.run([*keygen, "keys", "curve", str(tmp_path / "engine"), "--client", "gateway"], check=True)
    subprocess.run([*keygen, "keys", "http", "add", str(tmp_path / "keys.toml"), "--owner", "me"], check=True)
    fleet |= {"model": str(DEMO_MODEL), "keys": str(tmp_path / "keys.toml")}
    if "engine-keys" in fleet:
        fleet["engine-keys"] = str(tmp_path / "engine")
    options = options_of(fleet, tmp_path, name)
    assert options.gpus == 1 and told.http_options.host == options.host and told.http_options.port == options.port
