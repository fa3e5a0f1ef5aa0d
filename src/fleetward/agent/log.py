"""Log lines of the agent: for a person on stderr, as JSON in `agent.log`, which stays bounded.

Owns the two forms of a line. Refuses to know who logs what.
"""

import json
import logging
import sys
import time
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

FILE_BYTES_MAX: Final = 4 * 1024 * 1024
FILES_MAX: Final = 2

_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line, with the fields that were given as `extra`."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        line: dict[str, object] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
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


def start_logging(path: Path) -> None:
    """Send every line to stderr and to the file, which is its owner's alone."""
    with suppress(OSError):
        path.touch(mode=0o600)
    on_stderr = logging.StreamHandler(sys.stderr)
    on_stderr.setFormatter(PlainLines("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    in_file = RotatingFileHandler(path, maxBytes=FILE_BYTES_MAX, backupCount=FILES_MAX, delay=True)
    in_file.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [on_stderr, in_file]
    root.setLevel(logging.INFO)
    # A full disk must not stop the work: a line that cannot be written is lost, and nothing more.
    logging.raiseExceptions = False
    # Connections that break are told by whoever needed them.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
