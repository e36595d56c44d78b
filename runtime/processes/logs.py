"""Logging of the command and its processes to stderr, as lines of text or as JSON objects.

Level and format are environment variables, so that child processes inherit them.
"""

import faulthandler
import json
import logging
import os
import sys
from datetime import UTC, datetime

LEVEL_VARIABLE, FORMAT_VARIABLE = "SIDESTREAM_LOG_LEVEL", "SIDESTREAM_LOG_FORMAT"
LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the object; `exception` has the traceback."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure_logging(process: str, level: str = "info") -> None:
    """Log to stderr under the name of this process, and the stacks of its threads if it crashes.

    `level`: default if the environment has none.
    """
    faulthandler.enable(2)
    given = os.environ.get(LEVEL_VARIABLE, "")
    handler = logging.StreamHandler()
    if is_json():
        handler.setFormatter(JsonFormatter(process))
        logging.captureWarnings(True)
        sys.excepthook = lambda kind, error, trace: logging.critical("uncaught error", exc_info=(kind, error, trace))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(message)s"))
    logging.basicConfig(level=(given if given in LEVELS else level).upper(), handlers=[handler])


def is_json() -> bool:
    """Return whether lines on stderr are JSON objects."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def progress_line(line: str, process: str = "supervisor") -> str:
    """Return a line about the progress of the command in the chosen format. It is printed at every level."""
    if not is_json():
        return f"sidestream: {line}"
    level = logging.ERROR if line.startswith("error: ") else logging.INFO
    return JsonFormatter(process).format(logging.LogRecord("sidestream", level, "", 0, line, None, None))
