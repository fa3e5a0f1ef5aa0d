"""Small artifacts that travel inside a report.

Owns the order that makes them safe: bytes checked and on disk in one pack, then rows, then the report.
Refuses to know large files: those have uploads of their own.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from fleetward.controller.blobs import BlobStore
from fleetward.controller.store import artifacts
from fleetward.controller.store.tx import Tx
from fleetward.domain.artifacts import INLINE_BYTES_MAX, INLINE_SYNC_BYTES_MAX, RECEIPT_PATH
from fleetward.domain.errors import Refusal
from fleetward.verify.digest import Digest
from fleetward.verify.manifest import parse_entries
from fleetward.wire.messages import InlineArtifact

if TYPE_CHECKING:
    from fleetward.controller.services.sync import Report


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A small file whose bytes are on disk, and where."""

    artifact: InlineArtifact
    pack: str
    offset: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of the small files of a batch: kept, or why an attempt's files were not taken."""

    files: dict[UUID, list[KeptFile]] = field(default_factory=dict[UUID, list[KeptFile]])
    faults: dict[UUID, str] = field(default_factory=dict[UUID, str])


def keep(reports: Sequence["Report"], *, blobs: BlobStore) -> Kept:
    """Check the small files of these reports and put all good ones on disk with one sync."""
    kept = Kept()
    members: list[tuple[UUID, InlineArtifact]] = []
    for report in reports:
        fault = _fault(report.held.inline)
        if fault is not None:
            kept.faults[report.claim.id] = fault
        else:
            members.extend((report.claim.id, artifact) for artifact in report.held.inline)
    if members:
        pack = blobs.store_pack([artifact.content for _, artifact in members])
        for (assignment_id, artifact), offset in zip(members, pack.offsets, strict=True):
            kept.files.setdefault(assignment_id, []).append(KeptFile(artifact=artifact, pack=pack.name, offset=offset))
    return kept


def record(tx: Tx, reports: Sequence["Report"], kept: Kept) -> list["Report"]:
    """Record the kept files, and turn a success that cannot stand into the failure that it is."""
    _insert(tx, reports, kept)
    claims_success = [report.claim.id for report in reports if report.state == "succeeded"]
    unstored = tx.all(artifacts.UNSTORED, assignment_ids=claims_success) if claims_success else []
    missing = {row.assignment_id: row.path for row in unstored}
    return [_judged(report, kept.faults.get(report.claim.id), missing.get(report.claim.id)) for report in reports]


def _judged(report: "Report", fault: str | None, missing: str | None) -> "Report":
    if report.state == "succeeded" and fault is None and missing is not None:
        fault = f"the node said succeeded, but never stored the artifact {missing!r} that it declared"
    if fault is None or report.state not in {"succeeded", "failed"}:
        return report
    return dataclasses.replace(report, state="failed", outcome="rejected", error=fault)


def _fault(files: Sequence[InlineArtifact]) -> str | None:
    try:
        parse_entries(files)
    except Refusal as error:
        return f"the report's files cannot be taken: {error.message}"
    if sum(len(file.content) for file in files) > INLINE_SYNC_BYTES_MAX:
        return f"the report's files are together larger than {INLINE_SYNC_BYTES_MAX} bytes"
    for file in files:
        found = Digest.of(file.content).hex
        if len(file.content) > INLINE_BYTES_MAX:
            return f"artifact {file.path!r} is too large to travel inside a report"
        if found != file.sha256 or len(file.content) != file.size_bytes:
            return (
                f"artifact {file.path!r}: declared {file.size_bytes} bytes with SHA-256 {file.sha256}, "
                f"but {len(file.content)} bytes with {found} arrived"
            )
    return None


def _insert(tx: Tx, reports: Sequence["Report"], kept: Kept) -> None:
    rows = [(report, file) for report in reports for file in kept.files.get(report.claim.id, [])]
    if not rows:
        return
    tx.later(
        artifacts.KEEP_BLOBS,
        digests=[file.artifact.sha256 for _, file in rows],
        sizes=[file.artifact.size_bytes for _, file in rows],
        packs=[file.pack for _, file in rows],
        offsets=[file.offset for _, file in rows],
    )
    tx.later(
        artifacts.DECLARE_HELD,
        ids=[tx.new_id() for _ in rows],
        assignment_ids=[report.claim.id for report, _ in rows],
        fences=[report.claim.fence for report, _ in rows],
        paths=[file.artifact.path for _, file in rows],
        sizes=[file.artifact.size_bytes for _, file in rows],
        digests=[file.artifact.sha256 for _, file in rows],
        media_types=[file.artifact.media_type for _, file in rows],
        receipt_path=RECEIPT_PATH,
    )
    tx.later(
        artifacts.STORED,
        assignment_ids=[report.claim.id for report, _ in rows],
        paths=[file.artifact.path for _, file in rows],
        digests=[file.artifact.sha256 for _, file in rows],
        sizes=[file.artifact.size_bytes for _, file in rows],
    )
