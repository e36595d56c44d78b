"""The Ray Serve application of a fleet: a deployment of engines, and one that answers HTTP."""

import socket
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from .engine import STOP_SECONDS, Engine
from .ingress import Ingress
from .options import FleetOptions, gateway_settings, serve_settings
from .policy import LoadPolicy
from .request_router import EngineRouter

METRICS_SECONDS = 1.0
LOOK_BACK_SECONDS = 4.0
HEALTH_SECONDS = 2.0
MAX_OPEN = 8192
"""Requests that one of HTTP's processes may have open; the gateway's own bounds are below it."""
_ENVIRONMENT = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": str(METRICS_SECONDS),
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": str(METRICS_SECONDS),
}
"""Ray's own ten seconds are long for a queue."""


def build(options: FleetOptions) -> Application:
    """What `serve.run` takes. Ray has to be connected."""
    drain = options.drain_seconds + STOP_SECONDS
    engines = serve.deployment(
        Engine,
        name="engine",
        ray_actor_options=resources(options),
        autoscaling_config=scaling(options),
        request_router_config={"request_router_class": f"{EngineRouter.__module__}:{EngineRouter.__name__}"},
        max_ongoing_requests=1000,
        max_constructor_retry_count=3,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=drain + STOP_SECONDS,
        max_surge_percent=options.surge_percent,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=options.ingresses,
        ray_actor_options={
            "num_cpus": 0,
            "resources": options.ingress_resources,
            "runtime_env": {"env_vars": _ENVIRONMENT},
        },
        max_ongoing_requests=MAX_OPEN,
        max_queued_requests=MAX_OPEN,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        health_check_period_s=HEALTH_SECONDS,
        # what waits in it for an engine still has to be answered
        graceful_shutdown_timeout_s=options.patience_seconds + drain,
        max_surge_percent=100,  # the new one answers before the old one stops
    )
    settings = gateway_settings(options)
    bound = engines.bind(serve_settings(options), settings.engine_keys)
    return ingress.bind(settings, options.patience_seconds, options.adapters_root, bound)


def resources(options: FleetOptions) -> dict[str, Any]:
    """What Ray sets aside for an engine. All of it lies on one host, so several GPUs need no placement group."""
    gpus = options.gpus
    if gpus is None:
        without = options.on_cpu or ("device" not in options.llm and not ray.cluster_resources().get("GPU"))
        gpus = 0 if without else options.ranks
    return {"num_cpus": options.cpus, "num_gpus": gpus, "runtime_env": {"env_vars": _ENVIRONMENT}}


def lacking(options: FleetOptions) -> str:
    """Why engines have to wait for a place, in words; "" if there is a node for one. Ray has to be connected."""
    wanted = resources(options)
    largest = {
        kind: max((node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
        for kind in ("GPU", "CPU")
    }
    lacks = [
        f"{count:g} {kind}s"
        for kind, count in (("GPU", wanted["num_gpus"]), ("CPU", wanted["num_cpus"]))
        if count > largest[kind]
    ]
    return f"no node of this Ray has {' and '.join(lacks)} for an engine: engines wait until one comes" if lacks else ""


def scaling(options: FleetOptions) -> dict[str, Any]:
    """When Ray starts and stops engines; `policy` says how many are wanted."""
    return {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas,
        "upscale_delay_s": options.scale_up_seconds,
        "downscale_delay_s": options.idle_seconds,
        "downscale_to_zero_delay_s": options.idle_seconds,
        "look_back_period_s": LOOK_BACK_SECONDS,
        "metrics_interval_s": METRICS_SECONDS,  # Ray wants it shorter than the look back, whatever the environment says
        "policy": {
            "policy_function": f"{LoadPolicy.__module__}:{LoadPolicy.__name__}",
            "policy_kwargs": {"target_requests": options.target_requests, "target_tokens": options.target_tokens},
        },
    }


def deploy(options: FleetOptions) -> None:
    """Start the fleet, or change the one of this name: replicas are replaced one by one. Returns when it is ready.

    Ray has to be connected. Raises ValueError when it does not come up, or when Ray answers HTTP elsewhere.
    """
    serve.start(proxy_location=options.proxy_location, http_options={"host": options.host, "port": options.port})
    try:
        serve.run(build(options), name=options.name, route_prefix="/")
    except RuntimeError as error:
        raise ValueError(f"the fleet {options.name!r} did not come up: {_why(options.name) or error}") from None
    try:
        socket.create_connection(("127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host, options.port), 5)
    except OSError:
        raise ValueError(
            f"Ray Serve runs here already and answers HTTP at another address than {options.host} port {options.port}: "
            "name that one, or end it with `serve shutdown`"
        ) from None


def _why(name: str) -> str:
    """What Ray says of the deployments that do not run: the last line, which names the error, and no stack."""
    found = serve.status().applications.get(name)
    ill = [] if found is None else [each for each in found.deployments.values() if each.status.value != "HEALTHY"]
    lines = [line.strip() for each in ill for line in each.message.splitlines() if line.strip()]
    return lines[-1].removeprefix("RuntimeError: ") if lines else ""
