"""What people do with jobs: submit, look, cancel.

Owns these use cases. Refuses to know how a job is run.
"""

import hashlib
from uuid import UUID

import msgspec

from fleetward.controller.scheduler.plan import Candidate, why_not
from fleetward.controller.services import assigning
from fleetward.controller.store import artifacts as artifact_rows
from fleetward.controller.store import assignments as assignment_rows
from fleetward.controller.store import events as event_rows
from fleetward.controller.store import jobs
from fleetward.controller.store.tx import Database, Tx, as_json
from fleetward.domain.errors import (
    BlobNotFound,
    IdempotencyKeyReused,
    JobNotFound,
    MalformedRequest,
    PreconditionFailed,
    quoted,
)
from fleetward.domain.ids import JobId, UserId
from fleetward.domain.jobs import JobSpec, JobStatus, check_spec, stored_spec
from fleetward.verify.policy import parse_rules
from fleetward.wire.messages import (
    Artifact,
    ArtifactList,
    Assignment,
    AssignmentList,
    CancelRequest,
    Event,
    Events,
    Job,
    JobList,
    JobSubmitted,
)

PAGE_MAX = 1000
KEY_CHARS_MAX = 200
NUMBER_MAX = 2**63 - 1  # of a cursor, as of the columns that it is made of


def submit(
    database: Database, spec: JobSpec, *, by: UserId, idempotency_key: str | None = None, kind: str = "command"
) -> JobSubmitted:
    """Make a job; the same key and document again give the same job."""
    check_spec(spec)
    parse_rules(spec.artifacts)
    document = msgspec.json.encode(spec)
    digest = hashlib.sha256(document).hexdigest()
    if idempotency_key is not None and not 0 < len(idempotency_key) <= KEY_CHARS_MAX:
        raise MalformedRequest(f"an idempotency key has from 1 to {KEY_CHARS_MAX} characters", field="Idempotency-Key")
    with database.begin() as tx:
        if idempotency_key is not None:
            earlier = tx.maybe(jobs.RECALL, owner_id=by, key=idempotency_key)
            if earlier is not None:
                return _same_answer(earlier, digest, idempotency_key)
        _check_inputs(tx, spec, by=by)
        made = jobs.insert(
            tx,
            id=JobId(tx.new_id()),
            kind=kind,
            spec=spec,
            document=document.decode(),
            owner_id=by,
            actor=f"user:{by}",
        )
        submitted = msgspec.convert(made, JobSubmitted, from_attributes=True)
        if idempotency_key is not None:
            tx.later(
                jobs.REMEMBER,
                owner_id=by,
                key=idempotency_key,
                request_digest=digest,
                reply=as_json(msgspec.to_builtins(submitted)),
            )
    return submitted


def listing(database: Database, *, limit: int, after: str | None, status: str | None) -> JobList:
    """A page of jobs, newest first."""
    limit = page(limit)
    if status is not None and status not in set(JobStatus):
        raise MalformedRequest(f"{quoted(status)} is no job status: {', '.join(JobStatus)}", field="status")
    with database.begin() as tx:
        rows = tx.all(jobs.LIST, limit=limit + 1, before=_cursor(after), status=status)
    items = [_job(row) for row in rows[:limit]]
    return JobList(items=items, next=str(items[-1].id) if len(rows) > limit else None)


def show(database: Database, job_id: UUID) -> Job:
    """A job as it stands, and why it waits if it does."""
    with database.begin() as tx:
        row = tx.maybe(jobs.SHOW, job_id=job_id)
        if row is None:
            raise not_found(job_id)
        return _job(row, why=_why(tx, row))


def cancel(database: Database, job_id: UUID, *, request: CancelRequest, by: UserId) -> Job:
    """Ask for a job's end: a queued one ends at once, a running one when its nodes have stopped it."""
    with database.begin() as tx:
        job = tx.maybe(jobs.LOCK, job_ids=[job_id])
        if job is None:
            raise not_found(job_id)
        if request.expect_status is not None and request.expect_status != job.status:
            raise PreconditionFailed(f"job {job_id} is {job.status}, not {quoted(request.expect_status)}")
        tx.maybe(jobs.REQUEST_CANCEL, job_id=job_id, reason=request.reason, actor=f"user:{by}")
        if job.status == JobStatus.QUEUED:
            tx.all(jobs.CANCEL_QUEUED, job_id=job_id, actor=f"user:{by}")
    return show(database, job_id)


def assignments(database: Database, job_id: UUID) -> AssignmentList:
    """All attempts of a job, oldest first."""
    with database.begin() as tx:
        _expect(tx, job_id)
        rows = tx.all(assignment_rows.BY_JOB, job_id=job_id, limit=PAGE_MAX)
    return AssignmentList(items=[msgspec.convert(row, Assignment, from_attributes=True) for row in rows])


def artifacts(database: Database, job_id: UUID) -> ArtifactList:
    """All artifacts of a job, the winner's first."""
    with database.begin() as tx:
        _expect(tx, job_id)
        rows = tx.all(artifact_rows.OF_JOB, job_id=job_id, limit=PAGE_MAX * 10)
    return ArtifactList(items=[msgspec.convert(row, Artifact, from_attributes=True) for row in rows])


def events(database: Database, job_id: UUID, *, after: str, limit: int) -> Events:
    """The settled events of a job after a cursor."""
    epoch, txid, event_id = _event_cursor(after)
    with database.begin() as tx:
        _expect(tx, job_id)
        rows = tx.all(
            event_rows.OF_JOB,
            job_id=job_id,
            after_epoch=epoch,
            after_txid=txid,
            after_id=event_id,
            limit=page(limit),
        )
    items = [_event(row) for row in rows]
    return Events(items=items, next=items[-1].cursor if items else after)


def page(limit: int) -> int:
    """Check a page size."""
    if not 1 <= limit <= PAGE_MAX:
        raise MalformedRequest(f"limit {limit} is out of range; from 1 to {PAGE_MAX}", field="limit")
    return limit


def not_found(job_id: UUID) -> JobNotFound:
    """The answer for a job that is not there."""
    return JobNotFound(f"no job has the id {job_id}", hint="`fleetward job ls` lists them")


def _expect(tx: Tx, job_id: UUID) -> None:
    if tx.maybe(jobs.SHOW, job_id=job_id) is None:
        raise not_found(job_id)


def _same_answer(earlier: jobs.Answer, digest: str, key: str) -> JobSubmitted:
    if earlier.request_digest != digest:
        raise IdempotencyKeyReused(
            f"the idempotency key {quoted(key)} was used for another job document",
            hint="use a new key for a new job",
        )
    return msgspec.convert(earlier.reply, JobSubmitted)


def _check_inputs(tx: Tx, spec: JobSpec, *, by: UserId) -> None:
    wanted = sorted({archive.sha256 for archive in spec.inputs})
    if not wanted:
        return
    owned = {row.sha256 for row in tx.all(artifact_rows.OWNED, user_id=by, digests=wanted)}
    for digest in wanted:
        if digest not in owned:
            raise BlobNotFound(f"the input {digest} is not stored for you", hint="upload it first")


def _cursor(after: str | None) -> UUID | None:
    if after is None:
        return None
    try:
        return UUID(after)
    except ValueError as error:
        raise MalformedRequest(f"{quoted(after)} is no cursor of this list", field="after") from error


def _event_cursor(after: str) -> tuple[int, int, int]:
    parts = (after or "0.0.0").split(".")
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) <= 19]
    if len(parts) != 3 or len(numbers) != 3 or max(numbers) > NUMBER_MAX:
        raise MalformedRequest(f"{quoted(after)} is no cursor of this list", field="after")
    return numbers[0], numbers[1], numbers[2]


def _event(row: event_rows.EventRow) -> Event:
    return Event(
        cursor=f"{row.epoch}.{row.txid}.{row.id}",
        id=row.id,
        kind=row.kind,
        actor=row.actor,
        at=row.at,
        job_id=row.job_id,
        assignment_id=row.assignment_id,
        node_id=row.node_id,
        node=row.node,
        data=row.data,
    )


def _job(row: jobs.JobRow, *, why: str = "") -> Job:
    return Job(
        id=row.id,
        kind=row.kind,
        name=row.name,
        status=row.status,
        priority=row.priority,
        spec=stored_spec(row.spec),
        replicas=row.replicas,
        quorum=row.quorum,
        failures=row.failures,
        losses=row.losses,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        cancel_requested_at=row.cancel_requested_at,
        winning_assignment_id=row.winning_assignment_id,
        error=row.error,
        why=why,
    )


def _why(tx: Tx, row: jobs.JobRow) -> str:
    """Say what a job waits for, in one line."""
    if row.cancel_requested_at is not None and row.unreleased:
        return f"cancelling ({row.unreleased} attempt(s) not known gone)"
    if row.status != JobStatus.QUEUED:
        return ""
    if row.held_until is not None:
        return f"waits after a failed attempt until {row.held_until:%H:%M:%S} UTC"
    rooms = assigning.rooms(tx)
    reasons = why_not(_as_candidate(row, stored_spec(row.spec)), rooms)
    if not rooms:
        return "no eligible node: none is online"
    if sum(reasons.values()) < len(rooms):
        return "about to be assigned"
    return "no eligible node: " + ", ".join(f"{reason} excludes {count}" for reason, count in reasons.most_common())


def _as_candidate(row: jobs.JobRow, spec: JobSpec) -> Candidate:
    return Candidate(
        id=JobId(row.id),
        owner_id=None,
        shape="",
        priority=row.priority,
        created_at=row.created_at,
        cpus_milli=row.cpus_milli,
        memory_bytes=row.memory_bytes,
        labels=spec.labels,
        sandbox=spec.sandbox,
        wanted=1,
    )
