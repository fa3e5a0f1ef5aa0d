"""What can begin before the rest of the program is loaded: the home's lock, its log, the port, PostgreSQL.

Owns these first steps, so that the server comes up while modules are imported. Refuses to import anything
that takes long.
"""

import errno
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from fleetward.controller.config import Config, Listen
from fleetward.controller.embedded import EmbeddedPostgres
from fleetward.controller.home import LOG, Home
from fleetward.controller.log import start_logging
from fleetward.domain.errors import InvalidSetting

_LOG: Final = logging.getLogger(__name__)
BACKLOG: Final = 4096  # a whole fleet may come back at once after an outage


class Starting:
    """The embedded PostgreSQL as it comes up, in a thread of its own."""

    def __init__(self, home: Home) -> None:
        self._server = EmbeddedPostgres(home.path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._started = self._thread.submit(self._server.start)

    def admin_url(self) -> str:
        """Wait until the server is ready, and say where its administrator finds it."""
        url = self._started.result()
        for notice in self._server.notices:
            _LOG.warning("%s", notice)
        return url

    def keep_up(self) -> bool:
        """Start the server again if it died; data that was promised is on its disk."""
        if not self._server.running:
            _LOG.error("PostgreSQL ended by itself and is started again; its log is postgres.log")
            self._server.start()
        return False

    def stop(self) -> None:
        """Stop the server, also one that is still coming up."""
        self._thread.shutdown()
        self._server.stop()


@dataclass(frozen=True, slots=True)
class Begun:
    """What has begun. `database` is None where a URL was given."""

    config: Config
    home: Home
    bound: socket.socket
    database: Starting | None


def begin(config: Config, *, parts: ExitStack) -> Begun:
    """Take the home and the port and start the database; `parts` ends all of it."""
    home = Home.hold(config.home)
    parts.callback(home.release)
    start_logging(home.path / LOG, level=config.log_level)
    bound = bind(config.listen)
    parts.callback(bound.close)
    database = None
    if not config.database_url:
        database = Starting(home)
        parts.callback(database.stop)
    return Begun(config, home, bound, database)


def bind(listen: Listen) -> socket.socket:
    """Take the port, or say that someone else has it."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((listen.host, listen.port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        reason = "another program listens there" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise InvalidSetting(
            f"setting listen cannot be {listen.text!r}: {reason}",
            hint="is a controller running already? `fleetward status` shows it; else choose another port with --listen",
            field="listen",
        ) from error
    return bound
