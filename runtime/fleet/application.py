"""The Ray Serve application of a fleet: the deployments `engine` and `ingress`."""

import socket
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from .engine import STOP_SECONDS, Engine
from .ingress import Ingress
from .options import FleetOptions, gateway_settings, serve_settings
from .policies import METRICS_SECONDS, EngineRouter, autoscaling_config

HEALTH_SECONDS = 2.0
MAX_OPEN = 8192
"""Open requests of one ingress. The gateway's own limits are lower."""
_ENVIRONMENT = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": str(METRICS_SECONDS),
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": str(METRICS_SECONDS),
}
"""Ray's default of 10 s is too slow to react to a queue."""


def build(options: FleetOptions) -> Application:
    """Return the application for `serve.run`. Ray must be connected."""
    drain = options.drain_seconds + STOP_SECONDS
    engines = serve.deployment(
        Engine,
        name="engine",
        ray_actor_options=resources(options),
        autoscaling_config=autoscaling_config(options),
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
        # requests that wait for an engine must still be answered
        graceful_shutdown_timeout_s=options.patience_seconds + drain,
        max_surge_percent=100,  # the new replica starts before the old one stops
    )
    settings = gateway_settings(options)
    bound = engines.bind(serve_settings(options), settings.engine_keys)
    return ingress.bind(settings, options.patience_seconds, options.adapters_root, bound)


def resources(options: FleetOptions) -> dict[str, Any]:
    """Return Ray's resources for an engine. They are on one host, so several GPUs need no placement group."""
    gpus = options.gpus
    if gpus is None:
        on_cpu = options.on_cpu or ("device" not in options.llm and not ray.cluster_resources().get("GPU"))
        gpus = 0 if on_cpu else options.tp_size
    return {"num_cpus": options.cpus, "num_gpus": gpus, "runtime_env": {"env_vars": _ENVIRONMENT}}


def missing_resources(options: FleetOptions) -> str:
    """Return why no node can run an engine, "" if one can. Ray must be connected."""
    required = resources(options)
    largest = {
        kind: max((node["Resources"].get(kind, 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
        for kind in ("GPU", "CPU")
    }
    missing = [
        f"{count:g} {kind}s"
        for kind, count in (("GPU", required["num_gpus"]), ("CPU", required["num_cpus"]))
        if count > largest[kind]
    ]
    return (
        f"no node of this Ray has {' and '.join(missing)} for an engine: engines wait until one joins"
        if missing
        else ""
    )


def deploy(options: FleetOptions) -> None:
    """Start the fleet, or update the one of this name by replacing replicas one by one. Returns when it is ready.

    Ray must be connected. Raises ValueError if it does not start, or if Ray serves HTTP at another address.
    """
    serve.start(proxy_location=options.proxy_location, http_options={"host": options.host, "port": options.port})
    try:
        serve.run(build(options), name=options.name, route_prefix="/")
    except RuntimeError as error:
        raise ValueError(f"the fleet {options.name!r} did not start: {_failure(options.name) or error}") from None
    try:
        socket.create_connection(("127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host, options.port), 5)
    except OSError:
        raise ValueError(
            f"Ray Serve is already running and serves HTTP at another address than {options.host} port {options.port}: "
            "use that address, or stop it with `serve shutdown`"
        ) from None


def _failure(name: str) -> str:
    """Return the last line of Ray's messages on unhealthy deployments: it names the error."""
    status = serve.status().applications.get(name)
    unhealthy = (
        [] if status is None else [each for each in status.deployments.values() if each.status.value != "HEALTHY"]
    )
    lines = [line.strip() for each in unhealthy for line in each.message.splitlines() if line.strip()]
    return lines[-1].removeprefix("RuntimeError: ") if lines else ""
