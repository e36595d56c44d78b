"""Addresses and names of hosts: loopback addresses, names in Host headers, networks of proxies."""

import ipaddress
import re
from collections.abc import Iterable

ALL = "*"
_HOST_HEADER = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d{0,5})?")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
_PREFIX = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)+")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether an address is one of this machine's loopback; False if it is not an address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def is_loopback_name(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    return host == "localhost" or is_loopback(host)


def host_name(header: str) -> str | None:
    """Return the name or address in a Host header, in lower case and without its port; None for an invalid header."""
    match = _HOST_HEADER.fullmatch(header.strip())
    return None if match is None else match[1].strip("[]").lower().removesuffix(".")


def parse_hosts(values: Iterable[str]) -> list[str]:
    """Return the names of --allowed-hosts. Raises ValueError."""
    hosts = []
    for value in values:
        name = host_name(value) if value.startswith("[") else value.lower().removesuffix(".")
        if name is None or (value != ALL and _NAME.fullmatch(name) is None and not is_address(name)):
            raise ValueError(
                f"--allowed-hosts: {value!r} is not the name of a host; give names or addresses without a scheme and "
                "a port, as in gateway.example, or * for all"
            )
        hosts.append(name)
    return hosts


def parse_networks(values: Iterable[str]) -> list[str]:
    """Return the networks of --trusted-proxies, for IPv4 also as a socket of IPv6 reports them. Raises ValueError."""
    networks = []
    for value in values:
        try:
            network = ipaddress.ip_network(value)
        except ValueError as error:
            raise ValueError(
                f"--trusted-proxies: {value!r} is neither an address nor a network ({error}); give an address such as "
                "10.0.0.7, or a network such as 10.0.0.0/8"
            ) from None
        networks.append(str(network))
        if network.version == 4:
            networks.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return networks


def parse_root_path(value: str) -> str:
    """Return the prefix of --root-path without a slash at its end; "" for none. Raises ValueError."""
    prefix = value.rstrip("/")
    if prefix and (_PREFIX.fullmatch(prefix) is None or f"{prefix}/".startswith("/v1/")):
        raise ValueError(
            f"--root-path: {value!r} is not the prefix of a proxy; give a path of letters, digits, '.', '_' and '-' "
            "that is not below /v1, as in /llm"
        )
    return prefix


def in_networks(host: str, networks: Iterable[Network]) -> bool:
    """Return whether an address is in one of the networks."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in networks)
