"""The table of fields of HTTP bodies in docs/http_fields.md."""

import json

from ....runtime.api.unsupported import ANY
from ....runtime.gateway.api.field_table import EMPTY, ENDPOINTS, ROWS, Row

HEAD = ("fields", "endpoints", "accepted", "remedy, or why there is no effect")


def field_rows() -> list[tuple[str, str, str, str]]:
    """Return the cells of each row."""
    return [
        (
            " ".join(f"`{name}`" for name in row.names.split()),
            "all" if row.endpoints == ENDPOINTS else ", ".join(row.endpoints),
            _accepted(row),
            row.option.remedy,
        )
        for row in ROWS
    ]


def _accepted(row: Row) -> str:
    accepted = row.option.accepted
    if ANY in accepted:
        return "all values"
    empty = accepted[: len(EMPTY)] == EMPTY
    others = [f"`{json.dumps(value)}`" for value in (accepted[len(EMPTY) :] if empty else accepted)]
    return ", ".join(["empty"] * empty + others)
