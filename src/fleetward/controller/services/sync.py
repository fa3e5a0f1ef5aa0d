"""One call for everything: what nodes report goes in, what they should hold comes out.

Owns the order of a sync: believe, keep bytes, lock, report, renew, release, beat, settle, answer. All
concurrent calls share one transaction, so a renewal is committed before any reply. Refuses to know
HTTP and the hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

import msgspec

from fleetward.controller.blobs import BlobStore
from fleetward.controller.services import inline, sessions, settling
from fleetward.controller.services.sessions import NodeCredential
from fleetward.controller.store import assignments, jobs, nodes
from fleetward.controller.store.assignments import Claim, HeldRow
from fleetward.controller.store.tx import Database, Later, Tx, as_json
from fleetward.domain.errors import Refusal
from fleetward.domain.jobs import stored_spec
from fleetward.domain.nodes import Rhythm
from fleetward.wire.messages import AssignmentOrder, HeldAssignment, SyncReply, SyncRequest

ENDED = frozenset({"failed", "cancelled"})  # the states after which a job is settled anew
HELD_MAX = 10_000  # assignments in one report; far beyond any machine, short of harm


@dataclass(frozen=True, slots=True)
class SyncCall:
    """One node's call, with what its token proves."""

    credential: NodeCredential
    request: SyncRequest


@dataclass(frozen=True, slots=True)
class Report:
    """News of one assignment: where its node says it stands, in the database's words."""

    claim: Claim
    job_id: UUID
    held: HeldAssignment
    state: str
    outcome: str | None
    error: str | None


@dataclass(slots=True)
class _Round:
    """What one batch of calls amounts to."""

    refusals: dict[int, Refusal] = field(default_factory=dict[int, Refusal])
    believed: dict[UUID, SyncCall] = field(default_factory=dict[UUID, SyncCall])
    promotable: set[UUID] = field(default_factory=set[UUID])
    reports: list[Report] = field(default_factory=list[Report])
    releases: list[Claim] = field(default_factory=list[Claim])
    renewals: list[Claim] = field(default_factory=list[Claim])


def sync(
    database: Database, calls: Sequence[SyncCall], *, blobs: BlobStore, rhythm: Rhythm
) -> list[SyncReply | Refusal]:
    """Take in what the nodes say and tell each what to hold; one answer per call, in order."""
    with database.begin() as tx:
        node_ids = [call.credential.node_id for call in calls]
        found, unreleased = tx.later(nodes.LIVE, node_ids=node_ids), tx.later(assignments.UNRELEASED, node_ids=node_ids)
        now = tx.now
    live = {node.id: node for node in found.rows}
    held = _by_node(unreleased.rows)
    round = _believe(calls, live, now=now)
    for node_id, call in round.believed.items():
        _read_report(round, call, held.get(node_id, {}))
    kept = inline.keep(round.reports, blobs=blobs)
    with database.begin() as tx:
        accepted = _apply(tx, round, kept, rhythm=rhythm)
        unreleased = tx.later(assignments.UNRELEASED, node_ids=list(accepted))
        answered_at = tx.now
    orders = _by_node(unreleased.rows)
    return [
        _answer(index, call, round, accepted, orders, rhythm=rhythm, now=answered_at)
        for index, call in enumerate(calls)
    ]


def look(database: Database, calls: Sequence[SyncCall], *, rhythm: Rhythm) -> list[SyncReply | Refusal]:
    """Answer held calls anew without taking anything in: what they said was taken in when they came."""
    with database.begin() as tx:
        node_ids = [call.credential.node_id for call in calls]
        found, unreleased = tx.later(nodes.LIVE, node_ids=node_ids), tx.later(assignments.UNRELEASED, node_ids=node_ids)
        now = tx.now
    live = {node.id: node for node in found.rows}
    orders = _by_node(unreleased.rows)
    return [
        refusal
        if (refusal := _refusal(call, live.get(call.credential.node_id), now=now, is_held=True)) is not None
        else _reply(call, orders.get(call.credential.node_id, {}), rhythm=rhythm, now=now)
        for call in calls
    ]


def has_news(request: SyncRequest, reply: SyncReply) -> bool:
    """Whether the reply tells the node something that its request shows it does not know yet."""
    known = {held.id: held.known for held in request.held}
    told = {order.id: order.desired for order in reply.assignments}
    return known != told


def _by_node(rows: Sequence[HeldRow]) -> dict[UUID, dict[UUID, HeldRow]]:
    grouped: dict[UUID, dict[UUID, HeldRow]] = {}
    for row in rows:
        grouped.setdefault(row.node_id, {})[row.id] = row
    return grouped


def _believe(calls: Sequence[SyncCall], live: Mapping[UUID, nodes.LiveNode], *, now: datetime) -> _Round:
    """Sort out whose call counts. The database guards the same again when rows are written."""
    round = _Round()
    for index, call in enumerate(calls):
        node = live.get(call.credential.node_id)
        refusal = _refusal(call, node, now=now)
        earlier = round.believed.get(call.credential.node_id)
        if refusal is not None:
            round.refusals[index] = refusal
        elif earlier is None or earlier.request.sequence < call.request.sequence:
            round.believed[call.credential.node_id] = call
            if node is not None and node.status in {"provisioning", "offline"}:
                round.promotable.add(node.id)
    return round


def _refusal(call: SyncCall, node: nodes.LiveNode | None, *, now: datetime, is_held: bool = False) -> Refusal | None:
    credential = call.credential
    if node is None:
        return sessions.stale()
    if node.status == "removed":
        return sessions.removed(str(node.id))
    if node.eligible_reason == "cloned":
        return sessions.cloned(str(node.id))
    if node.session != credential.session or node.key_epoch != credential.key_epoch or credential.expires_at <= now:
        return sessions.stale()
    newest = call.request.sequence + 1 if is_held else call.request.sequence
    if node.beat_session == credential.session and newest <= (node.sequence or 0):
        # Overtaken on the way, or said twice: all its news is in the newer call. A copied machine ends here
        # too, and is found out when it opens a session with a nonce that is not the journal's.
        return sessions.stale()
    if len(call.request.held) > HELD_MAX:
        return sessions.stale()
    return None


def _read_report(round: _Round, call: SyncCall, rows: Mapping[UUID, HeldRow]) -> None:
    """Compare what the node says it holds with what it should hold."""
    said = {held.id: held for held in call.request.held}
    for held in said.values():
        row = rows.get(held.id)
        if row is None or row.fence != held.fence:
            continue
        claim = _claim(row, call.credential)
        if held.state != row.state and row.state in {"assigned", "running"} and held.state != "assigned":
            round.reports.append(_report(claim, row, held))
        if row.is_open:
            round.renewals.append(claim)
        if held.released:
            round.releases.append(claim)
    for row in rows.values():
        # What was started and is not held any more is gone: only an undelivered one may be missing.
        if row.id in said or row.state == "assigned":
            continue
        claim = _claim(row, call.credential)
        if row.state == "running":
            gone = HeldAssignment(id=row.id, fence=row.fence, state="lost", error="the node does not know it any more")
            round.reports.append(_report(claim, row, gone))
        round.releases.append(claim)


def _claim(row: HeldRow, credential: NodeCredential) -> Claim:
    return Claim(
        id=row.id,
        fence=row.fence,
        node_id=credential.node_id,
        session=credential.session,
        key_epoch=credential.key_epoch,
    )


def _report(claim: Claim, row: HeldRow, held: HeldAssignment) -> Report:
    """Put a node's word into the database's: who is to blame for an end is the controller's to say."""
    state, outcome = held.state, None
    match held.state:
        case "cancelled" if row.is_cancelling:
            state, outcome = "cancelled", "cancelled"
        case "lost" | "cancelled":
            state, outcome = "failed", "lost"
        case "failed":
            outcome = "failed"
        case _:
            pass
    error = held.error or ("the node gave no reason" if state == "failed" else None)
    return Report(claim=claim, job_id=row.job_id, held=held, state=state, outcome=outcome, error=error)


def _apply(tx: Tx, round: _Round, kept: inline.Kept, *, rhythm: Rhythm) -> dict[UUID, SyncCall]:
    """Write one batch, locks first; a call overtaken meanwhile changes nothing."""
    jobs.lock(tx, [report.job_id for report in round.reports])
    if round.promotable:
        # One strength for all, or two batches could each wait for the other's rows.
        nodes.lock(tx, round.believed)
    else:
        nodes.lock_shared(tx, round.believed)
    accepted = _beat(tx, round, rhythm=rhythm)
    promotable = sorted(round.promotable & accepted.keys())
    if promotable:
        tx.later(nodes.PROMOTE, node_ids=promotable)
    reports = [report for report in round.reports if report.claim.node_id in accepted]
    reports = inline.record(tx, reports, kept)
    moved = _report_all(tx, reports) if reports else None
    assignments.renew(tx, _accepted(round.renewals, accepted), lease=rhythm.lease)
    assignments.release(tx, _accepted(round.releases, accepted))
    if moved is not None and any(report.state in ENDED for report in reports):
        tx.flush()
        settling.settle(tx, {row.job_id for row in moved.rows if row.state in ENDED})
    return accepted


def _accepted(claims: Sequence[Claim], accepted: Mapping[UUID, SyncCall]) -> list[Claim]:
    return [claim for claim in claims if claim.node_id in accepted]


def _beat(tx: Tx, round: _Round, *, rhythm: Rhythm) -> dict[UUID, SyncCall]:
    believed = sorted(round.believed.items())
    if not believed:
        return {}
    rows = tx.all(
        nodes.BEAT,
        node_ids=[node_id for node_id, _ in believed],
        sessions=[call.credential.session for _, call in believed],
        key_epochs=[call.credential.key_epoch for _, call in believed],
        sequences=[call.request.sequence for _, call in believed],
        loads=[as_json(msgspec.to_builtins(call.request.load)) for _, call in believed],
        beat_seconds=rhythm.beat.total_seconds(),
    )
    beaten = {row.id for row in rows}
    return {node_id: call for node_id, call in believed if node_id in beaten}


def _report_all(tx: Tx, reports: Sequence[Report]) -> Later[assignments.Ended]:
    return tx.later(
        assignments.REPORT,
        states=[report.state for report in reports],
        outcomes=[report.outcome for report in reports],
        errors=[report.error for report in reports],
        results=[as_json({"exit_code": report.held.exit_code}) for report in reports],
        **assignments.claim_columns(report.claim for report in reports),
    )


def _answer(
    index: int,
    call: SyncCall,
    round: _Round,
    accepted: Mapping[UUID, SyncCall],
    orders: Mapping[UUID, Mapping[UUID, HeldRow]],
    *,
    rhythm: Rhythm,
    now: datetime,
) -> SyncReply | Refusal:
    refusal = round.refusals.get(index)
    if refusal is not None:
        return refusal
    if accepted.get(call.credential.node_id) is not call:
        return sessions.stale()
    return _reply(call, orders.get(call.credential.node_id, {}), rhythm=rhythm, now=now)


def _reply(call: SyncCall, rows: Mapping[UUID, HeldRow], *, rhythm: Rhythm, now: datetime) -> SyncReply:
    known = {held.id for held in call.request.held}
    return SyncReply(
        assignments=[_order(row, is_known=row.id in known, now=now) for row in rows.values()],
        sequence=call.request.sequence,
        lease_seconds=rhythm.lease.total_seconds(),
        beat_seconds=rhythm.beat.total_seconds(),
        server_time=now,
    )


def _order(row: HeldRow, *, is_known: bool, now: datetime) -> AssignmentOrder:
    is_wanted = row.state in {"assigned", "running", "succeeded"} and not row.is_cancelling
    return AssignmentOrder(
        id=row.id,
        fence=row.fence,
        job_id=row.job_id,
        attempt=row.attempt,
        desired="run" if is_wanted else "stop",
        lease_seconds=(row.lease_expires_at - now).total_seconds(),
        spec=None if is_known else stored_spec(row.spec),
    )
