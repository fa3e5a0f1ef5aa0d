"""Hints between controllers: NOTIFY on one connection, LISTEN on another.

Owns both connections and the form of a message. No transaction that writes ever notifies: that would
put all of them through one lock. Refuses to know what the topics mean.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Final

import psycopg

from fleetward.domain.errors import DatabaseUnavailable, InvalidSetting

PAYLOAD_CHARS_MAX: Final = 7_900  # PostgreSQL takes payloads below 8,000 bytes; topics are ASCII
LOOK_SECONDS: Final = 0.5  # how soon a listener sees that the channel was closed
CONNECT_SECONDS: Final = 5

LISTEN: Final = "LISTEN fleetward"
NOTIFY: Final = """
    SELECT pg_notify('fleetward', payload)
    FROM unnest(%(payloads)s::text[]) AS payload
    """
# Whoever keeps artifacts in a folder of its own holds this alone; those who share a folder hold it together.
PLACE_ALONE: Final = "SELECT pg_advisory_lock(hashtextextended('fleetward artifacts', 0))"
PLACE_SHARED: Final = "SELECT pg_advisory_lock_shared(hashtextextended('fleetward artifacts', 0))"
PLACE_TIMEOUT: Final = "SET lock_timeout = '3s'"  # what a killed controller's session may take to end
# A hint may be lost, so its commit need not reach the disk.
RELAX: Final = "SET synchronous_commit = off"


class PostgresChannel:
    """The channel of one controller. It does not hear itself."""

    def __init__(self, conninfo: str, *, controller_id: str) -> None:
        self._conninfo = conninfo
        self._id = controller_id
        self._sender: psycopg.Connection | None = None
        self._shares_artifacts = False
        self._is_closed = threading.Event()

    def join(self, *, shares_artifacts: bool) -> None:
        """Take a place among the controllers, or refuse: artifacts in one's own folder are nobody else's to read."""
        self._shares_artifacts = shares_artifacts
        try:
            self._sender = self._connect()
            self._sender.execute(RELAX)
            self._sender.execute(PLACE_TIMEOUT)
            self._sender.execute(PLACE_SHARED if shares_artifacts else PLACE_ALONE)
        except psycopg.errors.LockNotAvailable as error:
            self._drop_sender()
            raise InvalidSetting(
                "another controller of this database runs, and artifacts lie in a local folder that only one may use",
                hint="stop the other one, or give all of them the same shared folder with --artifacts-url file:///…",
                field="artifacts_url",
            ) from error
        except psycopg.Error as error:
            self._drop_sender()
            raise DatabaseUnavailable(f"the database cannot be reached: {error}") from error

    def send(self, topics: list[str]) -> None:
        """Tell the other controllers; a broken connection is made anew at the next call."""
        if self._sender is None:
            self.join(shares_artifacts=self._shares_artifacts)
        assert self._sender is not None, "whoever joined has a sender"
        try:
            self._sender.execute(NOTIFY, {"payloads": list(_payloads(self._id, topics))})
        except psycopg.Error as error:
            self._drop_sender()
            raise DatabaseUnavailable(f"no hint could be sent to the other controllers: {error}") from error

    def listen(self, *, heard: Callable[[list[str]], None], joined: Callable[[], None]) -> None:
        """Hear the other controllers until the channel is closed."""
        try:
            with self._connect() as connection:
                connection.execute(LISTEN)
                joined()
                while not self._is_closed.is_set():
                    for notice in connection.notifies(timeout=LOOK_SECONDS, stop_after=1):
                        sender, *topics = notice.payload.split(" ")
                        if sender != self._id:
                            heard(topics)
        except psycopg.Error as error:
            raise DatabaseUnavailable(f"hints of the other controllers cannot be heard: {error}") from error

    def close(self) -> None:
        """End the listening, soon, and the sending."""
        self._is_closed.set()
        self._drop_sender()

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(
            self._conninfo, autocommit=True, connect_timeout=CONNECT_SECONDS, application_name="fleetward-hints"
        )

    def _drop_sender(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


def _payloads(sender: str, topics: list[str]) -> Iterator[str]:
    payload = sender
    for topic in topics:
        if len(payload) + 1 + len(topic) > PAYLOAD_CHARS_MAX:
            yield payload
            payload = sender
        payload = f"{payload} {topic}"
    yield payload
