"""Log lines: where they go and what they look like.

Owns the two forms of a line: for a person on stderr, as JSON in `controller.log`, which stays bounded.
Refuses to know who logs what.
"""

import json
import logging
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

FILE_BYTES_MAX: Final = 16 * 1024 * 1024
FILES_MAX: Final = 3  # a busy day of warnings; what matters is in the database's events

_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line, with the fields that were given as `extra`."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        line: dict[str, object] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "where": record.name,
            "event": record.getMessage(),
        }
        line |= {name: str(value) for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            line["cause"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


class PlainLines(logging.Formatter):
    """A line for a person; control characters in it are shown, never sent to the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        text = super().format(record)
        return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def start_logging(path: Path, *, level: str) -> None:
    """Send every line to stderr and to the file."""
    in_file = RotatingFileHandler(path, maxBytes=FILE_BYTES_MAX, backupCount=FILES_MAX)
    path.chmod(0o600)
    in_file.setFormatter(JsonLines())
    on_stderr = logging.StreamHandler(sys.stderr)
    on_stderr.setFormatter(PlainLines("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [in_file, on_stderr]
    root.setLevel(level.upper())
    # The server's own lines say when it starts and stops, which ours do too.
    for name in ("uvicorn", "uvicorn.error", "psycopg.pool"):
        logging.getLogger(name).setLevel(logging.WARNING)
