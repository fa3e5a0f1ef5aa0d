"""Bytes that come in pieces: artifacts, logs and inputs, and who may write and read them."""

import hashlib
from pathlib import Path

import pytest

from fleetward.controller.services import artifacts, jobs, logs
from fleetward.domain.errors import (
    ArtifactConflict,
    ArtifactNotFound,
    AssignmentLost,
    BlobNotFound,
    DigestMismatch,
    UploadOffset,
)
from fleetward.domain.jobs import parse_spec
from fleetward.wire.messages import AssignmentOrder, DeclaredArtifact, DeclareRequest
from tests.services.fleet import Fleet, Machine, holds, inline, succeeded

LARGE = bytes(range(256)) * 1024
DIGEST = hashlib.sha256(LARGE).hexdigest()
DECLARED = DeclaredArtifact(path="large.bin", size_bytes=len(LARGE), sha256=DIGEST)


def begin(fleet: Fleet) -> tuple[Machine, AssignmentOrder]:
    """A node that runs a job with one large artifact."""
    ada = fleet.node("ada")
    fleet.submit(artifacts=[{"path": "large.bin"}], max_attempts=1)
    fleet.assign()
    (order,) = fleet.sync(ada).assignments
    fleet.sync(ada, holds(order))
    return ada, order


def declare(fleet: Fleet, machine: Machine, order: AssignmentOrder, *files: DeclaredArtifact):
    assert machine.credential is not None
    return artifacts.declare(
        fleet.database,
        machine.credential,
        assignment_id=order.id,
        request=DeclareRequest(fence=order.fence, artifacts=list(files)),
        blobs=fleet.blobs,
    )


def upload(
    fleet: Fleet, machine: Machine, order: AssignmentOrder, *, offset: int, content: bytes, path: str = "large.bin"
):
    assert machine.credential is not None
    return artifacts.upload(
        fleet.database,
        machine.credential,
        assignment_id=order.id,
        fence=order.fence,
        path=path,
        offset=offset,
        chunks=[content],
        blobs=fleet.blobs,
    )


def test_an_upload_goes_on_where_it_was_cut_off_and_is_stored_once_whole(fleet: Fleet):
    ada, order = begin(fleet)
    assert declare(fleet, ada, order, DECLARED).uploads[0].received_bytes == 0
    assert not upload(fleet, ada, order, offset=0, content=LARGE[:1000]).stored
    assert declare(fleet, ada, order, DECLARED).uploads[0].received_bytes == 1000
    with pytest.raises(UploadOffset):
        upload(fleet, ada, order, offset=5, content=LARGE[5:])
    assert upload(fleet, ada, order, offset=1000, content=LARGE[1000:]).stored
    assert upload(fleet, ada, order, offset=1000, content=LARGE[1000:]).stored
    fleet.sync(ada, succeeded(order))
    fleet.verify()
    assert fleet.status(order.job_id) == "completed"
    size, content = artifacts.open_artifact(
        fleet.database, job_id=order.job_id, path="large.bin", blobs=fleet.blobs, offset=10
    )
    assert (size, b"".join(content)) == (len(LARGE), LARGE[10:])


def test_the_same_artifact_twice_with_other_bytes_is_refused(fleet: Fleet):
    ada, order = begin(fleet)
    declare(fleet, ada, order, DECLARED)
    other = DeclaredArtifact(path="large.bin", size_bytes=3, sha256=hashlib.sha256(b"abc").hexdigest())
    with pytest.raises(ArtifactConflict):
        declare(fleet, ada, order, other)


def test_other_bytes_than_declared_are_refused_and_the_success_with_them(fleet: Fleet):
    ada, order = begin(fleet)
    declare(fleet, ada, order, DECLARED)
    with pytest.raises(DigestMismatch):
        upload(fleet, ada, order, offset=0, content=b"\0" * len(LARGE))
    fleet.sync(ada, succeeded(order))
    job = jobs.show(fleet.database, order.job_id)
    assert job.status == "failed"
    assert "large.bin" in str(job.error)


def test_an_undeclared_artifact_is_refused_by_name(fleet: Fleet):
    ada, order = begin(fleet)
    with pytest.raises(ArtifactNotFound, match="secret"):
        upload(fleet, ada, order, offset=0, content=b"x", path="secret")


def test_another_node_or_an_ended_attempt_writes_nothing(fleet: Fleet):
    ada, order = begin(fleet)
    eve = fleet.node("eve")
    with pytest.raises(AssignmentLost):
        declare(fleet, eve, order, DECLARED)
    fleet.sync(ada, holds(order, "failed", exit_code=1, error="exit code 1"))
    with pytest.raises(AssignmentLost):
        declare(fleet, ada, order, DECLARED)


def test_a_log_is_kept_in_order_each_byte_once(fleet: Fleet):
    ada, order = begin(fleet)

    def append(offset: int, content: bytes) -> int:
        assert ada.credential is not None
        return logs.append(
            fleet.database, ada.credential, assignment_id=order.id, fence=order.fence, offset=offset, content=content
        ).received_bytes

    assert append(0, b"one\n") == 4
    assert append(0, b"one\ntwo\n") == 8
    with pytest.raises(UploadOffset, match="8"):
        append(9, b"late")
    assert append(8, b"\xff\n") == 10
    log = logs.read(fleet.database, job_id=order.job_id, assignment_id=None, offset=2)
    assert (log.content, log.next_offset, log.ended) == (b"e\ntwo\n\xff\n", 10, False)
    fleet.sync(ada, holds(order, "failed", exit_code=1, error="exit code 1", released=True))
    assert append(10, b"last\n") == 15
    assert logs.read(fleet.database, job_id=order.job_id, assignment_id=None, offset=15).ended


def test_an_input_is_read_only_by_a_node_that_runs_its_job(fleet: Fleet):
    stored = artifacts.store_blob(
        fleet.database, by=fleet.owner, sha256=DIGEST, chunks=[LARGE], size_bytes=len(LARGE), blobs=fleet.blobs
    )
    assert stored.size_bytes == len(LARGE)
    ada, eve = fleet.node("ada"), fleet.node("eve")
    fleet.submit(inputs=[{"sha256": DIGEST}], labels={})
    fleet.assign()
    holders = [node for node in (ada, eve) if fleet.sync(node).assignments]
    (other,) = [node for node in (ada, eve) if node not in holders]
    assert holders[0].credential is not None
    assert other.credential is not None
    content = artifacts.open_input(fleet.database, holders[0].credential, sha256=DIGEST, blobs=fleet.blobs)
    assert b"".join(content) == LARGE
    with pytest.raises(BlobNotFound):
        artifacts.open_input(fleet.database, other.credential, sha256=DIGEST, blobs=fleet.blobs)


def test_a_job_whose_input_was_never_shown_is_refused(fleet: Fleet):
    spec = parse_spec({"command": ["true"], "inputs": [{"sha256": DIGEST}]})
    with pytest.raises(BlobNotFound, match=DIGEST):
        jobs.submit(fleet.database, spec, by=fleet.owner)


def test_half_done_uploads_are_kept_while_their_attempt_may_go_on_and_swept_after(fleet: Fleet):
    ada, order = begin(fleet)
    declare(fleet, ada, order, DECLARED)
    upload(fleet, ada, order, offset=0, content=LARGE[:1000])
    assert artifacts.sweep(fleet.database, blobs=fleet.blobs) == 0
    assert declare(fleet, ada, order, DECLARED).uploads[0].received_bytes == 1000
    fleet.sync(ada, holds(order, "failed", exit_code=1, error="exit code 1", released=True))
    assert artifacts.sweep(fleet.database, blobs=fleet.blobs) == 1


def test_bytes_that_rot_are_found_before_a_win_and_the_next_good_copy_takes_their_place(fleet: Fleet, tmp_path: Path):
    ada = fleet.node("ada")
    job_id = fleet.submit(artifacts=[{"path": "*.txt"}], max_attempts=3)
    fleet.assign()
    (order,) = fleet.sync(ada).assignments
    fleet.sync(ada, succeeded(order, inline("out.txt", b"good")))
    (pack,) = (tmp_path / "blobs" / "packs").iterdir()
    pack.chmod(0o600)
    pack.write_bytes(pack.read_bytes().replace(b"good", b"rots"))
    fleet.verify()
    (attempt,) = jobs.assignments(fleet.database, job_id).items
    assert (attempt.state, attempt.outcome) == ("failed", "rejected")
    assert "out.txt" in str(attempt.error)
    fleet.check()
    other = fleet.submit(artifacts=[{"path": "*.txt"}])
    fleet.assign()
    (again,) = [order for order in fleet.sync(ada).assignments if order.job_id == other]
    fleet.sync(ada, succeeded(again, inline("out.txt", b"good"), inline("other.txt", b"so that the pack is another")))
    fleet.verify()
    assert fleet.status(other) == "completed"
    size, content = artifacts.open_artifact(fleet.database, job_id=other, path="out.txt", blobs=fleet.blobs)
    assert (size, b"".join(content)) == (4, b"good")
