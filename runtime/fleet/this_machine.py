"""HTTP without keys is for this machine, whatever address Ray answers it at: `serve run` and a Serve config name an
address of their own, which fleet.toml cannot see.
"""

import ipaddress

from ..gateway.contracts import Caller, GatewayError
from ..gateway.serving.open_door import OpenDoor


class ThisMachine(OpenDoor):
    """Lets in all who ask from the loopback, and nobody else."""

    def identify(self, authorization: str | None, client_host: str) -> Caller:
        """See `Admission`. Raises GatewayError 403."""
        if not is_loopback(client_host):
            raise GatewayError(
                403,
                "this fleet has no keys, so it serves its own machine only; give fleet.toml `keys`, or "
                "`insecure = true` if the network is trusted",
                "permission_error",
                "keys_needed",
            )
        return super().identify(authorization, client_host)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own; False for what is none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
