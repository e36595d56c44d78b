"""Admission for HTTP without keys: loopback clients only. A file of its own, since it must not import Ray."""

from ..gateway.addresses import is_loopback
from ..gateway.auth.admission import NoAuth
from ..gateway.interfaces import Caller, GatewayError


class LoopbackOnly(NoAuth):
    """Admits loopback clients only: HTTP without keys is for this machine.

    It checks clients because `serve run` and a Serve config have their own listen address, unknown to fleet.toml.
    """

    def identify(self, authorization: str | None, client_host: str) -> Caller:
        """See `Admission`. Raises GatewayError 403."""
        if not is_loopback(client_host):
            raise GatewayError(
                403,
                "this fleet has no keys, so it serves only its own machine; set `keys` in fleet.toml, or "
                "`insecure = true` if the network is trusted",
                "permission_error",
                "keys_needed",
            )
        return super().identify(authorization, client_host)
