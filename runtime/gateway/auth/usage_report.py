"""Sums of requests, tokens and times over a usage log, by groups."""

import csv
import io
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .usage_database import UsageLogError, is_damage, open_to_read, use_readable_rows

# group -> its columns and their SQL expressions; an adapter may change its weights, so the hash is part of its group
GROUPS: dict[str, dict[str, str]] = {
    "owner": {"owner": "owner"},
    "key": {"key": "key"},
    "model": {"model": "model"},
    "adapter": {"adapter": "adapter", "adapter_content": "adapter_content"},
    "endpoint": {"endpoint": "endpoint"},
    "status": {"status": "status"},
    "error": {"error": "error"},
    "day": {"day": "date(time, 'unixepoch')"},
    "hour": {"hour": "strftime('%Y-%m-%dT%H:00Z', time, 'unixepoch')"},
}
SUMS = {
    "requests": "COUNT(*)",
    "failed": "SUM(status >= 400)",
    "prompt_tokens": "SUM(prompt_tokens)",
    "cached_tokens": "SUM(cached_tokens)",
    "output_tokens": "SUM(output_tokens)",
    "draft_tokens": "SUM(draft_tokens)",
    "accepted_tokens": "SUM(accepted_tokens)",
    "mean_first_token_seconds": "ROUND(AVG(NULLIF(first_token_seconds, 0)), 6)",
    "mean_total_seconds": "ROUND(AVG(total_seconds), 6)",
}


@dataclass(frozen=True)
class UsageReport:
    """Columns and rows: the groups, then SUMS; rows with the most tokens first.

    damaged   some pages of the log are damaged, and their requests are missing
    """

    columns: list[str]
    rows: list[tuple[str | int | float | None, ...]]
    damaged: bool = False


def report(
    path: Path, by: Sequence[str] = ("owner", "adapter"), since: float | None = None, until: float | None = None
) -> UsageReport:
    """Return the sums of requests from `since` until before `until`, in seconds since the epoch.

    Raises UsageLogError for a file that is not a usage log, ValueError for an unknown group.
    """
    unknown = [name for name in by if name not in GROUPS]
    if unknown:
        raise ValueError(f"--by {unknown[0][:80]}: usage is grouped by {', '.join(GROUPS)}")
    columns = {name: expression for group in by for name, expression in GROUPS[group].items()}
    conditions = [
        (condition, value) for condition, value in (("time >= ?", since), ("time < ?", until)) if value is not None
    ]
    query = f"SELECT {', '.join([*columns.values(), *SUMS.values()])} FROM usage"
    if conditions:
        query += " WHERE " + " AND ".join(condition for condition, _ in conditions)
    if columns:
        places = ", ".join(str(place + 1) for place in range(len(columns)))
        query += f" GROUP BY {places} ORDER BY SUM(prompt_tokens + output_tokens) DESC, {places}"
    values, damaged = [value for _, value in conditions], False
    connection = open_to_read(path)
    try:
        try:
            rows = connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            damaged = is_damage(error)
            if not damaged:
                raise
            use_readable_rows(connection, path)
            rows = connection.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise UsageLogError(f"{path} cannot be read: {error}") from None
    finally:
        connection.close()
    return UsageReport([*columns, *SUMS], [row for row in rows if row[len(columns)]], damaged)


def as_json(result: UsageReport) -> str:
    """Return a JSON list of objects."""
    return msgspec.json.format(
        msgspec.json.encode([dict(zip(result.columns, row, strict=True)) for row in result.rows])
    ).decode()


def as_csv(result: UsageReport) -> str:
    """Return a header line and a line per row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(result.columns)
    writer.writerows(result.rows)
    return text.getvalue()


def as_table(result: UsageReport) -> str:
    """Return a table for a terminal: text left, numbers right-aligned, `-` for empty values (such as no adapter)."""
    cells = [result.columns] + [[_cell_text(value) for value in row] for row in result.rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(result.columns))]
    left = len(result.columns) - len(SUMS)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _cell_text(value: str | int | float | None) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
