"""What attempts print, from the node to the reader.

Owns the order of a log: bytes by offset, each written once, in sequence. Refuses to know their meaning.
"""

from datetime import timedelta
from uuid import UUID

from fleetward.controller.services import jobs
from fleetward.controller.services.sessions import NodeCredential
from fleetward.controller.store import assignments, logs
from fleetward.controller.store import jobs as job_rows
from fleetward.controller.store.tx import Database
from fleetward.domain.errors import AssignmentLost, MalformedRequest, UploadOffset
from fleetward.domain.ids import AssignmentId
from fleetward.wire.messages import Log, LogState

AFTER_RELEASE = timedelta(seconds=60)  # a log's last bytes may be under way when the tree is gone
LOG_BYTES_MAX = 65 * 1024 * 1024  # what the supervisor keeps, and its marker
READ_CHUNKS = 16


def append(
    database: Database,
    credential: NodeCredential,
    *,
    assignment_id: UUID,
    fence: int,
    offset: int,
    content: bytes,
) -> LogState:
    """Add bytes at the end of an attempt's log; bytes that are there already are passed over."""
    with database.begin() as tx:
        held = tx.maybe(
            assignments.WRITABLE,
            id=assignment_id,
            fence=fence,
            node_id=credential.node_id,
            session=credential.session,
            key_epoch=credential.key_epoch,
            after_release=AFTER_RELEASE,
        )
        if held is None:
            raise lost(assignment_id)
        received = tx.one(logs.RECEIVED, assignment_id=assignment_id).received_bytes
        if offset > received:
            raise UploadOffset(f"the log has {received} bytes; go on there, not at {offset}", field="offset")
        fresh = content[received - offset :]
        if received + len(fresh) > LOG_BYTES_MAX:
            raise MalformedRequest(f"a log has at most {LOG_BYTES_MAX} bytes", field="offset")
        if fresh:
            tx.run(logs.APPEND, assignment_id=assignment_id, start_offset=received, content=fresh)
    return LogState(received_bytes=received + len(fresh))


def read(database: Database, *, job_id: UUID, assignment_id: AssignmentId | None, offset: int) -> Log:
    """A piece of a job's log: of one attempt, or of the winner, else of the latest."""
    with database.begin() as tx:
        job = tx.maybe(job_rows.SHOW, job_id=job_id)
        if job is None:
            raise jobs.not_found(job_id)
        source = tx.maybe(logs.SOURCE, job_id=job_id, assignment_id=assignment_id)
        if source is None:
            is_over = job.finished_at is not None
            return Log(assignment_id=None, offset=offset, next_offset=offset, content=b"", ended=is_over)
        chunks = tx.all(logs.READ, assignment_id=source.id, offset=offset, limit=READ_CHUNKS)
    content = b"".join(chunk.content[max(0, offset - chunk.start_offset) :] for chunk in chunks)
    return Log(
        assignment_id=source.id,
        offset=offset,
        next_offset=offset + len(content),
        content=content,
        ended=source.is_final and len(chunks) < READ_CHUNKS,
    )


def lost(assignment_id: UUID) -> AssignmentLost:
    """The answer to a node that writes for what is not its own any more."""
    return AssignmentLost(
        f"assignment {assignment_id} is not this session's to write for",
        hint="sync: the reply says what to hold",
    )
