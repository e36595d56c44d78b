"""State of a fleet, for `sidestream fleet status`."""

import asyncio
import re
from typing import Any

import msgspec
from msgspec import Struct, field

from ...ops.core.kv_layout import PAGE_SIZE
from ..gateway.router.router import Router
from ..processes.threads import prepare_types

_ROUTED = re.compile(r"routed_(\w+)_total")


class EngineLine(Struct, frozen=True, kw_only=True):
    """State of one engine, as an ingress sees it.

    routed   reason -> number of requests that were routed to it
    """

    name: str
    status: str
    requests_open: int = 0
    requests_waiting: int = 0
    tokens: int = 0
    adapters_on_gpu: int = 0
    adapters_in_memory: int = 0
    routed: dict[str, int] = field(default_factory=dict)


class FleetStatus(Struct, frozen=True, kw_only=True):
    """State of the Ray application and of the gateway.

    state       of the application, such as RUNNING
    message     Ray's message if the application is not healthy
    replicas    deployment -> state -> number of replicas
    """

    name: str
    state: str
    message: str = ""
    replicas: dict[str, dict[str, int]] = field(default_factory=dict)
    health: str = ""
    engines: list[EngineLine] = field(default_factory=list)
    adapters: int = 0


prepare_types(FleetStatus)


async def overview(router: Router) -> dict[str, Any]:
    """Return `health`, `engines` and `adapters` of a FleetStatus as plain data. Called in an ingress."""
    health, stats, adapters = await asyncio.gather(router.health(), router.stats(), router.adapters())
    engines = []
    for name, status in health.engines.items():
        numbers = stats.get(name, {})
        places = [card.places.get(name) for card in adapters]
        engines.append(
            EngineLine(
                name=name,
                status=status,
                requests_open=int(numbers.get("requests_open", 0)),
                requests_waiting=int(numbers.get("requests_waiting", 0)),
                tokens=int(numbers.get("pages_in_use", 0)) * PAGE_SIZE,
                adapters_on_gpu=places.count("gpu"),
                adapters_in_memory=places.count("cpu"),
                routed={match[1]: int(value) for each, value in numbers.items() if (match := _ROUTED.fullmatch(each))},
            )
        )
    return {"health": health.status, "engines": msgspec.to_builtins(engines), "adapters": len(adapters)}


def fleet_status(name: str, seconds: float = 10.0) -> FleetStatus:
    """Return the state of a fleet. Ray must be connected. Raises ValueError if the fleet does not exist."""
    from ray import serve
    from ray.exceptions import RayError

    application = serve.status().applications.get(name)
    if application is None:
        raise ValueError(f"this Ray has no fleet {name!r}; `sidestream fleet deploy` starts one")
    replicas = {each: dict(deployment.replica_states) for each, deployment in application.deployments.items()}
    gateway: dict[str, Any] = {}
    if replicas.get("ingress", {}).get("RUNNING"):
        try:
            gateway = serve.get_app_handle(name).overview.remote().result(timeout_s=seconds)
        except (RayError, TimeoutError) as problem:
            gateway = {"health": f"unknown: {type(problem).__name__}"}
    known = {"name": name, "state": str(application.status.value), "message": application.message, "replicas": replicas}
    return msgspec.convert(known | gateway, FleetStatus)


def format_status(status: FleetStatus) -> str:
    """Return the state as text for a terminal."""
    lines = [f"{status.name}: {status.state}" + (f", {status.health}" if status.health else "")]
    if status.message:
        lines.append(f"  {status.message.strip().splitlines()[0]}")
    for name, states in status.replicas.items():
        counts = ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items())) or "none"
        lines.append(f"{name:9} {counts}")
    if status.engines:
        lines.append("")
        lines.append("engine     status    open  waiting   tokens  adapters: GPU  memory   requests by reason")
    for each in status.engines:
        reasons = ", ".join(f"{reason.replace('_', ' ')} {count}" for reason, count in sorted(each.routed.items()))
        lines.append(
            f"{each.name:10} {each.status:8} {each.requests_open:5} {each.requests_waiting:8} {each.tokens:8} "
            f"{each.adapters_on_gpu:14} {each.adapters_in_memory:7}   {reasons}"
        )
    lines.append(f"{status.adapters} adapters")
    return "\n".join(lines)
