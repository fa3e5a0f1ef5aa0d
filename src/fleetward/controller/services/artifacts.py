"""Bytes in and bytes out: declared, uploaded by pieces, and read again.

Owns the guards around the blob store. Refuses to keep bytes itself, and to judge them.
"""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from uuid import UUID

from fleetward.controller.blobs import BlobStore, Location
from fleetward.controller.services import logs
from fleetward.controller.services.sessions import NodeCredential
from fleetward.controller.store import artifacts, assignments
from fleetward.controller.store.artifacts import ArtifactRow, Where
from fleetward.controller.store.tx import Database, Tx
from fleetward.domain.artifacts import RECEIPT_PATH
from fleetward.domain.errors import ArtifactConflict, ArtifactNotFound, BlobNotFound, quoted
from fleetward.domain.ids import UserId
from fleetward.verify.digest import Digest
from fleetward.verify.manifest import parse_entries
from fleetward.wire.messages import BlobStored, DeclareReply, DeclareRequest, UploadState


def declare(
    database: Database,
    credential: NodeCredential,
    *,
    assignment_id: UUID,
    request: DeclareRequest,
    blobs: BlobStore,
) -> DeclareReply:
    """Take down what an attempt will upload; saying it again tells how far each file has come."""
    entries = parse_entries(request.artifacts)
    with database.begin() as tx:
        _held(tx, credential, assignment_id=assignment_id, fence=request.fence)
        tx.all(
            artifacts.DECLARE_HELD,
            ids=[tx.new_id() for _ in entries],
            assignment_ids=[assignment_id for _ in entries],
            fences=[request.fence for _ in entries],
            paths=[entry.path for entry in entries],
            sizes=[entry.size_bytes for entry in entries],
            digests=[entry.digest.hex for entry in entries],
            media_types=[entry.media_type for entry in entries],
            receipt_path=RECEIPT_PATH,
        )
        rows = {row.path: row for row in tx.all(artifacts.OF_ASSIGNMENT, assignment_id=assignment_id)}
    for entry in entries:
        row = rows.get(entry.path)
        if row is None:
            raise logs.lost(assignment_id)
        if (row.sha256, row.size_bytes) != (entry.digest.hex, entry.size_bytes):
            raise _conflict(row)
    return DeclareReply(
        uploads=[_upload_state(rows[entry.path], blobs) for entry in entries],
    )


def upload(
    database: Database,
    credential: NodeCredential,
    *,
    assignment_id: UUID,
    fence: int,
    path: str,
    offset: int,
    chunks: Iterable[bytes],
    blobs: BlobStore,
) -> UploadState:
    """Add a piece of a declared file; when all bytes are there they are hashed, kept, and recorded as stored."""
    with database.begin() as tx:
        _held(tx, credential, assignment_id=assignment_id, fence=fence)
        rows = {row.path: row for row in tx.all(artifacts.OF_ASSIGNMENT, assignment_id=assignment_id)}
    row = rows.get(path)
    if row is None:
        raise ArtifactNotFound(f"this attempt has not declared {quoted(path)}", hint="declare it first")
    if row.state != "declared":
        return UploadState(path=row.path, received_bytes=row.size_bytes, stored=True)
    blobs.begin(row.id, size_bytes=row.size_bytes)
    received = blobs.append(row.id, offset=offset, size_bytes=row.size_bytes, chunks=chunks)
    if received < row.size_bytes:
        return UploadState(path=row.path, received_bytes=received, stored=False)
    location = blobs.finish(row.id, digest=Digest.parse(row.sha256), size_bytes=row.size_bytes)
    with database.begin() as tx:
        _held(tx, credential, assignment_id=assignment_id, fence=fence)
        _keep(tx, location)
        tx.all(
            artifacts.STORED,
            assignment_ids=[assignment_id],
            paths=[row.path],
            digests=[row.sha256],
            sizes=[row.size_bytes],
        )
    return UploadState(path=row.path, received_bytes=received, stored=True)


def open_input(
    database: Database, credential: NodeCredential, *, sha256: str, blobs: BlobStore, offset: int = 0
) -> Iterator[bytes]:
    """The bytes of an input that an attempt on this node needs."""
    with database.begin() as tx:
        where = tx.maybe(
            artifacts.OF_INPUT,
            sha256=sha256,
            node_id=credential.node_id,
            session=credential.session,
            key_epoch=credential.key_epoch,
        )
    if where is None:
        raise BlobNotFound(f"no attempt on this node needs the input {quoted(sha256)}")
    return blobs.read(_location(where), offset=offset)


def open_artifact(
    database: Database, *, job_id: UUID, path: str, blobs: BlobStore, offset: int = 0
) -> tuple[int, Iterator[bytes]]:
    """The size and the bytes, from `offset`, of a verified artifact of a completed job."""
    with database.begin() as tx:
        where = tx.maybe(artifacts.OF_WINNER, job_id=job_id, path=path)
    if where is None:
        raise ArtifactNotFound(
            f"job {job_id} has no verified artifact {quoted(path)}",
            hint="`fleetward job artifacts` lists what there is",
        )
    return where.size_bytes, blobs.read(_location(where), offset=offset)


def store_blob(
    database: Database, *, by: UserId, sha256: str, chunks: Iterable[bytes], size_bytes: int, blobs: BlobStore
) -> BlobStored:
    """Keep bytes that a user shows, under their digest; a job of that user may then take them as input."""
    digest = Digest.parse(sha256)
    with database.begin() as tx:
        upload_id = tx.new_id()
    blobs.begin(upload_id, size_bytes=size_bytes)
    try:
        blobs.append(upload_id, offset=0, size_bytes=size_bytes, chunks=chunks)
        location = blobs.finish(upload_id, digest=digest, size_bytes=size_bytes)
    except BaseException:
        blobs.abandon(upload_id)
        raise
    with database.begin() as tx:
        _keep(tx, location)
        tx.run(artifacts.OWN_BLOB, sha256=digest.hex, user_id=by)
    return BlobStored(sha256=digest.hex, size_bytes=location.size_bytes)


def sweep(database: Database, *, blobs: BlobStore) -> int:
    """Drop the half-done uploads that nobody will go on with; only before any writer, on a store of one's own."""
    with database.begin() as tx:
        keep = {row.id for row in tx.all(artifacts.UNFINISHED)}
    return blobs.sweep_uploads(keep=keep)


def _held(tx: Tx, credential: NodeCredential, *, assignment_id: UUID, fence: int) -> assignments.Writable:
    held = tx.maybe(
        assignments.WRITABLE,
        id=assignment_id,
        fence=fence,
        node_id=credential.node_id,
        session=credential.session,
        key_epoch=credential.key_epoch,
        after_release=timedelta(0),
    )
    if held is None or not held.is_open or held.state == "succeeded":
        raise logs.lost(assignment_id)
    return held


def _keep(tx: Tx, location: Location) -> None:
    tx.run(
        artifacts.KEEP_BLOBS,
        digests=[location.digest.hex],
        sizes=[location.size_bytes],
        packs=[location.pack],
        offsets=[location.offset],
    )


def _location(where: Where) -> Location:
    return Location(
        digest=Digest.parse(where.sha256), size_bytes=where.size_bytes, pack=where.pack, offset=where.pack_offset or 0
    )


def _upload_state(row: ArtifactRow, blobs: BlobStore) -> UploadState:
    if row.state != "declared":
        return UploadState(path=row.path, received_bytes=row.size_bytes, stored=True)
    received = blobs.begin(row.id, size_bytes=row.size_bytes)
    return UploadState(path=row.path, received_bytes=received, stored=False)


def _conflict(row: ArtifactRow) -> ArtifactConflict:
    return ArtifactConflict(
        f"artifact {row.path!r} was declared before with {row.size_bytes} bytes and SHA-256 {row.sha256}; "
        "an attempt's artifacts are write-once"
    )
