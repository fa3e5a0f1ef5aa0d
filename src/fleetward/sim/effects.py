"""Between any two effects anything may happen: the seams at which a world reaches into running services.

Owns the wrapped database and blob store, and the list of their boundaries; production code knows none of
them. Refuses to decide what happens there: that is the world's, which may do nothing, break the call, end
the controller, or let others act before it goes on.
"""

import random
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final
from uuid import UUID

import psycopg

from fleetward.controller.blobs import LocalBlobs, Location, Pack
from fleetward.controller.store.tx import Tx, transaction
from fleetward.domain.errors import DatabaseUnavailable, OutcomeUnknown, StorageFailed
from fleetward.verify.digest import Digest, Measured

WROTE: Final = "SELECT pg_current_xact_id_if_assigned() IS NOT NULL"


class Boundary(Enum):
    """A place between two effects."""

    BEGIN = "before a transaction"
    COMMIT = "before a commit"
    COMMITTED = "after a commit"
    WRITE = "before bytes are written"
    PIECE = "while bytes arrive"
    WRITTEN = "after bytes are written"
    READ = "before bytes are read"

    @property
    def is_free(self) -> bool:
        """Whether no transaction is open and no file is held, so that others may act meanwhile."""
        return self not in {Boundary.COMMIT, Boundary.PIECE}


class Crash(BaseException):
    """The controller is gone, in the middle of whatever it was doing."""


class BrokenConnection(DatabaseUnavailable):
    """A planted fault: the database did not answer."""


class BrokenCommit(OutcomeUnknown):
    """A planted fault: the answer to a COMMIT was lost."""


class BrokenDisk(StorageFailed):
    """A planted fault: the disk did not do what it was told."""


PLANTED: Final = (BrokenConnection, BrokenCommit, BrokenDisk)

Reach = Callable[[Boundary], None]


@dataclass(slots=True)
class SimDatabase:
    """A `Database` on one connection, with boundaries around every transaction."""

    connection: psycopg.Connection
    rng: random.Random
    reach: Reach
    is_dirty: bool = False

    def entropy(self, count: int) -> bytes:
        """Bytes of the world's one source of chance."""
        return self.rng.randbytes(count)

    @contextmanager
    def begin(self) -> Generator[Tx]:
        """Open a transaction as the real one does."""
        self.reach(Boundary.BEGIN)
        with transaction(self.connection, self) as tx:
            yield tx
            tx.flush()
            wrote = self.connection.execute(WROTE, prepare=True).fetchone() == (True,)
            self.reach(Boundary.COMMIT)
        self.is_dirty |= wrote
        self.reach(Boundary.COMMITTED)


@dataclass(slots=True)
class SimBlobs:
    """A `BlobStore` over a real local one, with boundaries around everything it does."""

    store: LocalBlobs
    reach: Reach

    def begin(self, upload_id: UUID, *, size_bytes: int) -> int:
        """Say where an upload goes on."""
        self.reach(Boundary.WRITE)
        return self.store.begin(upload_id, size_bytes=size_bytes)

    def append(self, upload_id: UUID, *, offset: int, size_bytes: int, chunks: Iterable[bytes]) -> int:
        """Take the next bytes, which may stop coming at any piece."""
        self.reach(Boundary.WRITE)
        received = self.store.append(upload_id, offset=offset, size_bytes=size_bytes, chunks=self._pieces(chunks))
        self.reach(Boundary.WRITTEN)
        return received

    def finish(self, upload_id: UUID, *, digest: Digest, size_bytes: int) -> Location:
        """Turn an upload into an object."""
        self.reach(Boundary.WRITE)
        location = self.store.finish(upload_id, digest=digest, size_bytes=size_bytes)
        self.reach(Boundary.WRITTEN)
        return location

    def abandon(self, upload_id: UUID) -> None:
        """Drop an upload."""
        self.store.abandon(upload_id)

    def sweep_uploads(self, *, keep: Collection[UUID]) -> int:
        """Drop all other temporaries."""
        return self.store.sweep_uploads(keep=keep)

    def store_pack(self, members: Sequence[bytes]) -> Pack:
        """Store small files together."""
        self.reach(Boundary.WRITE)
        pack = self.store.store_pack(members)
        self.reach(Boundary.WRITTEN)
        return pack

    def read(self, location: Location, *, offset: int = 0) -> Iterator[bytes]:
        """Read stored bytes."""
        self.reach(Boundary.READ)
        return self.store.read(location, offset=offset)

    def rehash(self, location: Location) -> Measured:
        """Say what stored bytes are."""
        self.reach(Boundary.READ)
        return self.store.rehash(location)

    def discard(self, location: Location) -> None:
        """Remove an object."""
        self.store.discard(location)

    def discard_pack(self, name: str) -> None:
        """Remove a pack."""
        self.store.discard_pack(name)

    def _pieces(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            yield chunk
            self.reach(Boundary.PIECE)
