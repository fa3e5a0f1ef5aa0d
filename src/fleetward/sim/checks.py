"""What must hold after every step: the invariants in SQL, and what only a run can show.

Owns the one question that asks the database everything at once, and the memory of earlier answers that
finality and growth are judged by. Refuses to know how a world came to be as it is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, LiteralString
from uuid import UUID

import msgspec
import psycopg
from msgspec import Struct
from psycopg.rows import tuple_row

from fleetward.controller.blobs import BlobStore, Location
from fleetward.controller.store import audit
from fleetward.domain.errors import BlobNotFound, Fault
from fleetward.sim.machine import Machine
from fleetward.verify.digest import Digest

APPLIED: Final = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 15, 16, 22, 23, 25, 36})
JOB_ENDS: Final = frozenset({"completed", "failed", "cancelled"})

# Rows of the world as they are, beside the rows that break an invariant: one round trip for both.
STANDING: Final[LiteralString] = """
    SELECT -1 AS number, 'job' AS subject, jsonb_build_object(
        'id', id, 'status', status, 'winner', winning_assignment_id, 'replicas', replicas
    )::text AS detail
    FROM jobs
    UNION ALL
    SELECT -2, 'assignment', jsonb_build_object(
        'id', id, 'job', job_id, 'node', node_id, 'state', state, 'fence', fence, 'open', is_open,
        'lease', lease_expires_at, 'verified', artifacts_verified_at, 'released', released_at
    )::text
    FROM job_assignments
    UNION ALL
    SELECT -3, 'artifact', jsonb_build_object(
        'assignment', file.assignment_id, 'path', file.path, 'sha256', file.sha256, 'state', file.state,
        'size_bytes', blob.size_bytes, 'pack', blob.pack, 'offset', blob.pack_offset
    )::text
    FROM job_artifacts AS file
    LEFT JOIN blobs AS blob ON blob.sha256 = file.sha256
    UNION ALL
    SELECT -4, 'node', jsonb_build_object('id', id, 'status', status, 'session', session)::text FROM compute_nodes
    UNION ALL
    SELECT -5, 'events', jsonb_build_object('count', count(*), 'last', coalesce(max(id), 0), 'clones', 0)::text
    FROM job_events
    UNION ALL
    SELECT -6, 'events', jsonb_build_object(
        'count', count(*), 'last', coalesce(max(id), 0), 'clones', count(*) FILTER (WHERE kind = 'node.cloned')
    )::text
    FROM audit_events
"""


class JobNow(Struct, frozen=True):
    """A job as it stands."""

    id: UUID
    status: str
    winner: UUID | None
    replicas: int


class AssignmentNow(Struct, frozen=True):
    """An assignment as it stands."""

    id: UUID
    job: UUID
    node: UUID
    state: str
    fence: int
    open: bool
    lease: datetime | None
    verified: datetime | None
    released: datetime | None

    @property
    def is_final(self) -> bool:
        """Whether its state may never change again."""
        return self.state in {"failed", "cancelled"} or self.verified is not None


class ArtifactNow(Struct, frozen=True):
    """A file of an attempt as it stands, and where its bytes lie."""

    assignment: UUID
    path: str
    sha256: str
    state: str
    size_bytes: int | None
    pack: str | None
    offset: int | None


class NodeNow(Struct, frozen=True):
    """A node as it stands."""

    id: UUID
    status: str
    session: int


class EventsNow(Struct, frozen=True):
    """How many events there are."""

    count: int
    last: int
    clones: int


class Violated(BaseException):
    """An invariant does not hold. Nothing in the world may catch this."""

    def __init__(self, number: int, sentence: str, subject: str, detail: str) -> None:
        super().__init__(f"I{number} {sentence}: {subject}: {detail}")
        self.number = number
        self.subject = subject


@dataclass(slots=True)
class Standing:
    """The world's rows after a step."""

    jobs: dict[UUID, JobNow] = field(default_factory=dict[UUID, JobNow])
    assignments: dict[UUID, AssignmentNow] = field(default_factory=dict[UUID, AssignmentNow])
    artifacts: list[ArtifactNow] = field(default_factory=list[ArtifactNow])
    nodes: dict[UUID, NodeNow] = field(default_factory=dict[UUID, NodeNow])
    events: dict[int, EventsNow] = field(default_factory=dict[int, EventsNow])

    def take(self, number: int, text: str) -> None:
        """Add a row."""
        match number:
            case -1:
                job = msgspec.json.decode(text, type=JobNow)
                self.jobs[job.id] = job
            case -2:
                assignment = msgspec.json.decode(text, type=AssignmentNow)
                self.assignments[assignment.id] = assignment
            case -3:
                self.artifacts.append(msgspec.json.decode(text, type=ArtifactNow))
            case -4:
                node = msgspec.json.decode(text, type=NodeNow)
                self.nodes[node.id] = node
            case _:
                self.events[number] = msgspec.json.decode(text, type=EventsNow)


def _question() -> LiteralString:
    """All invariants that apply, and the standing rows, as one statement."""
    parts: list[LiteralString] = []
    for number, sql in _numbered():
        words = ("SELECT", number, "AS number, subject, detail FROM (", sql, ") AS broken")
        parts.append(" ".join(words))
    return " UNION ALL ".join((*parts, STANDING))


def _numbered() -> Iterator[tuple[LiteralString, LiteralString]]:
    digits: tuple[LiteralString, ...] = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    for invariant in audit.INVARIANTS:
        if invariant.number in APPLIED:
            yield digits[invariant.number // 10] + digits[invariant.number % 10], invariant.statement.sql


@dataclass(slots=True)
class Checks:
    """All that must hold, with the memory that some of it needs."""

    observer: psycopg.Connection
    standing: Standing = field(default_factory=Standing)
    _question: LiteralString = field(default_factory=_question)

    def look(self, *, is_spoilt: bool) -> None:
        """Ask the database everything, and compare with what was. Where bytes were spoilt, some are missed."""
        sentences = {invariant.number: invariant.sentence for invariant in audit.INVARIANTS}
        now = Standing()
        with self.observer.cursor(row_factory=tuple_row) as cursor:
            rows = cursor.execute(self._question, {"measurements": list(audit.MEASUREMENTS)}, prepare=True).fetchall()
        for number, subject, detail in sorted(row for row in rows if row[0] > 0):
            if number == 25 and is_spoilt:
                continue
            raise Violated(number, sentences[number], subject, detail)
        for number, _, detail in rows:
            now.take(number, detail)
        _final_is_final(self.standing, now)
        _leases_only_lengthen(self.standing, now)
        _fences_grow(self.standing, now)
        _events_grow(self.standing, now)
        self.standing = now


def _final_is_final(before: Standing, now: Standing) -> None:
    sentence = "terminal is final"
    for job in before.jobs.values():
        later = now.jobs.get(job.id)
        if later is None or (job.status in JOB_ENDS and later != job):
            raise Violated(6, sentence, f"job {job.id}", f"it was {job.status} with {job.winner} and is {later}")
    for held in before.assignments.values():
        later = now.assignments.get(held.id)
        if later is None or (held.is_final and (later.state, later.verified) != (held.state, held.verified)):
            raise Violated(6, sentence, f"assignment {held.id}", f"it was {held.state} and is {later}")
        if held.released is not None and later.released != held.released:
            raise Violated(6, sentence, f"assignment {held.id}", f"released at {held.released}, now {later.released}")
    verified = {(file.assignment, file.path): file.sha256 for file in before.artifacts if file.state == "verified"}
    kept = {(file.assignment, file.path): file.sha256 for file in now.artifacts if file.state == "verified"}
    for key, digest in verified.items():
        if kept.get(key) != digest:
            raise Violated(6, sentence, f"artifact {key[1]} of {key[0]}", f"verified as {digest}, now {kept.get(key)}")


def _leases_only_lengthen(before: Standing, now: Standing) -> None:
    for held in before.assignments.values():
        later = now.assignments[held.id]
        if held.lease is None or later.lease is None or later.lease < held.lease:
            detail = f"its lease went from {held.lease} to {later.lease}"
            raise Violated(3, "a renewal only lengthens", f"assignment {held.id}", detail)


def _fences_grow(before: Standing, now: Standing) -> None:
    highest: dict[UUID, int] = {}
    for held in before.assignments.values():
        highest[held.job] = max(highest.get(held.job, 0), held.fence)
    for later in now.assignments.values():
        was = before.assignments.get(later.id)
        if was is None and later.fence <= highest.get(later.job, 0):
            detail = f"fence {later.fence} after {highest[later.job]}"
            raise Violated(1, "for each job the fence strictly grows", f"assignment {later.id}", detail)
        if was is not None and was.fence != later.fence:
            detail = f"fence {was.fence} became {later.fence}"
            raise Violated(1, "a fence never changes", f"assignment {later.id}", detail)


def _events_grow(before: Standing, now: Standing) -> None:
    for number, was in before.events.items():
        later = now.events[number]
        if later.count < was.count or later.last < was.last:
            raise Violated(22, "events only grow", "events", f"{was.count} events became {later.count}")
    if now.events[-6].clones:
        detail = "a node was called a clone, and nobody copied one"
        raise Violated(18, "twins are found where there are twins", "audit_events", detail)


def machines_agree(machines: Iterable[tuple[UUID, Machine]], standing: Standing) -> None:
    """What runs on the machines is what the database thinks may run there."""
    living = [(node, machine, process) for node, machine in machines for process in machine.living()]
    copies = Counter(process.job_id for _, _, process in living)
    for job_id, count in sorted(copies.items()):
        replicas = standing.jobs[job_id].replicas
        if count > replicas:
            detail = f"{count} attempts run at once, replicas {replicas}"
            raise Violated(2, "no more attempts of a job run than it has replicas", f"job {job_id}", detail)
    taken: Counter[UUID] = Counter()
    for node, machine, process in living:
        held = standing.assignments[process.id]
        if held.released is not None:
            detail = f"released at {held.released} and still running on {machine.name}"
            raise Violated(36, "what is released is gone", f"assignment {process.id}", detail)
        taken[node] += round(process.spec.resources.cpus * 1000)
        if taken[node] > machine.cpus_milli:
            detail = f"{taken[node]} of {machine.cpus_milli} thousandths of a CPU are in use"
            raise Violated(36, "no more runs on a node than it has room for", f"node {node}", detail)


def starts_are_single(machines: Iterable[Machine]) -> None:
    """No attempt is started twice on a node, whatever died in between."""
    for machine in machines:
        for attempt, count in machine.starts.items():
            if count > 1:
                detail = f"started {count} times on {machine.name}"
                raise Violated(1, "an attempt is started once", f"assignment {attempt}", detail)


def winners_have_bytes(before: Standing, now: Standing, *, blobs: BlobStore, spoilt: Mapping[str, int]) -> None:
    """The bytes of a job that has just been completed are there and are what was verified."""
    won = {
        job.winner
        for job in now.jobs.values()
        if job.winner is not None and (job.id not in before.jobs or before.jobs[job.id].winner is None)
    }
    for file in now.artifacts:
        if file.assignment not in won or file.sha256 in spoilt or file.pack in spoilt:
            continue
        where = f"artifact {file.path} of {file.assignment}"
        if file.size_bytes is None:
            raise Violated(25, "a verified artifact has its bytes", where, "there is no blob")
        digest = Digest.parse(file.sha256)
        try:
            found = blobs.rehash(Location(digest, file.size_bytes, file.pack, file.offset or 0))
        except (BlobNotFound, Fault) as error:
            raise Violated(25, "a verified artifact has its bytes", where, error.message) from error
        if found.digest != digest:
            detail = f"its bytes are {found.digest.hex}"
            raise Violated(25, "a verified artifact has its bytes", where, detail)
