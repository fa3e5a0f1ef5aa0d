"""The controller's own look at what attempts hand in.

Owns the way of a verdict: claim in one short transaction, re-hash outside any, record in another that
the fence guards. Refuses to know what a check means: `verify.policy` judges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from fleetward.controller.blobs import BlobStore, Location
from fleetward.controller.services import settling
from fleetward.controller.store import artifacts, assignments
from fleetward.controller.store.artifacts import Claimed, Evidence
from fleetward.controller.store.assignments import Ended
from fleetward.controller.store.tx import Database, Later, Tx, as_json
from fleetward.domain.artifacts import Verdict
from fleetward.domain.errors import BlobNotFound, Fault, Refusal
from fleetward.domain.jobs import JobSpec, stored_spec
from fleetward.verify.digest import Digest, Measured
from fleetward.verify.manifest import parse_entries
from fleetward.verify.policy import judge, parse_rules

# A job whose verifier died must still end within three leases. Hashing that takes longer is at worst begun
# twice, and the second verdict is refused.
CLAIM_LASTS = timedelta(minutes=2)
ERROR_PAUSE = timedelta(seconds=15)  # after trouble of our own, before the next look


@dataclass(frozen=True, slots=True)
class VerifyRound:
    """What one round did: how many verdicts, and whose nodes have news."""

    done: int
    nodes: frozenset[UUID]


@dataclass(frozen=True, slots=True)
class _Finding:
    claimed: Claimed
    verdict: Verdict
    checks: Sequence[Mapping[str, object]]
    error: str
    rotten: tuple[Evidence, ...] = ()


def verify(database: Database, blobs: BlobStore, *, verifier: str, limit: int = 100) -> VerifyRound:
    """Verify up to `limit` succeeded attempts that nobody else is looking at."""
    with database.begin() as tx:
        due = tx.later(artifacts.CLAIM_UNVERIFIED, limit=limit, claim=CLAIM_LASTS)
    claimed = due.rows
    if not claimed:
        return VerifyRound(done=0, nodes=frozenset())
    with database.begin() as tx:
        evidence = tx.later(artifacts.EVIDENCE, assignment_ids=[one.id for one in claimed])
        promises = tx.later(artifacts.PROMISES, job_ids=sorted({one.job_id for one in claimed}))
    specs = {promise.job_id: stored_spec(promise.spec) for promise in promises.rows}
    files: dict[UUID, list[Evidence]] = {}
    for file in evidence.rows:
        files.setdefault(file.assignment_id, []).append(file)
    findings = [_look(one, specs[one.job_id], files.get(one.id, []), blobs) for one in claimed]
    with database.begin() as tx:
        losers = _record(tx, findings, verifier=verifier)
    touched = {row.node_id for row in losers.rows} | {finding.claimed.node_id for finding in findings}
    return VerifyRound(done=len(findings), nodes=frozenset(touched))


def _look(claimed: Claimed, spec: JobSpec, files: Sequence[Evidence], blobs: BlobStore) -> _Finding:
    """Re-hash the stored bytes and judge them: trouble of our own blames nobody, nonsense blames the node."""
    try:
        measured = {file.path: found for file in files if (found := _measure(file, blobs)) is not None}
        judgement = judge(parse_rules(spec.artifacts), parse_entries(files), measured)
    except Fault as trouble:
        return _Finding(claimed, Verdict.ERROR, _one_check("storage", trouble.message), trouble.message)
    except Refusal as nonsense:
        return _Finding(claimed, Verdict.REJECTED, _one_check("manifest", nonsense.message), nonsense.message)
    rotten = tuple(file for file in files if file.path in measured and measured[file.path].digest.hex != file.sha256)
    return _Finding(claimed, judgement.verdict, judgement.checks_json(), judgement.error, rotten)


def _one_check(check: str, message: str) -> list[dict[str, object]]:
    return [{"check": check, "passed": False, "message": message}]


def _measure(file: Evidence, blobs: BlobStore) -> Measured | None:
    """What the stored bytes are, or nothing when there are none: a row alone is no evidence."""
    if file.blob_size_bytes is None:
        return None
    location = Location(
        digest=Digest.parse(file.sha256),
        size_bytes=file.blob_size_bytes,
        pack=file.pack,
        offset=file.pack_offset or 0,
    )
    try:
        return blobs.rehash(location)
    except BlobNotFound:
        return None


def _record(tx: Tx, findings: Sequence[_Finding], *, verifier: str) -> Later[Ended]:
    """Record verdicts and what follows, and return who lost; the events of a verification precede its completion."""
    recorded = {
        row.id: row.outcome
        for row in tx.all(
            artifacts.RECORD,
            ids=[finding.claimed.id for finding in findings],
            fences=[finding.claimed.fence for finding in findings],
            verdicts=[finding.verdict.value for finding in findings],
            checks=[as_json(finding.checks) for finding in findings],
            verifier=verifier,
        )
    }
    verified = [finding for finding in findings if recorded[finding.claimed.id] in {"verified", "won"}]
    won = sorted({finding.claimed.job_id for finding in verified if recorded[finding.claimed.id] == "won"})
    rejected = [finding for finding in findings if recorded[finding.claimed.id] == "rejected"]
    tx.later(artifacts.TELL_VERIFIED, ids=[finding.claimed.id for finding in verified], actor=verifier)
    tx.later(artifacts.TELL_COMPLETED, job_ids=won, actor=verifier)
    # Before the losers: an attempt that was looked at and found wanting is rejected, whoever won beside it.
    if rejected:
        tx.later(
            assignments.REJECT,
            ids=[finding.claimed.id for finding in rejected],
            fences=[finding.claimed.fence for finding in rejected],
            errors=[finding.error for finding in rejected],
            actor=verifier,
        )
    losers = tx.later(assignments.CANCEL_OPEN, job_ids=won, reason="another attempt won", actor=verifier)
    troubled = [finding.claimed.id for finding in findings if finding.verdict is Verdict.ERROR]
    if troubled:
        tx.later(artifacts.LET_GO, ids=troubled, pause=ERROR_PAUSE)
    rotten = [file for finding in findings for file in finding.rotten]
    if rotten:
        tx.later(artifacts.DAMAGE, digests=[file.sha256 for file in rotten], packs=[file.pack for file in rotten])
    settled = {finding.claimed.job_id for finding in [*rejected, *verified]} - set(won)
    settling.settle(tx, settled, actor=verifier)
    return losers
