"""One job all the way over HTTP: submitted, handed out, run, its bytes brought, verified, fetched."""

import hashlib
import json
from typing import Any

import pytest
from asking import Api, Node

from fleetward.domain.artifacts import RECEIPT_PATH
from fleetward.wire.messages import (
    AssignmentOrder,
    DeclaredArtifact,
    DeclareRequest,
    HeldAssignment,
    InlineArtifact,
)
from fleetward.wire.problem import RemoteRefusal, code_of

PIECE = 1024 * 1024


def submit(api: Api, node: Node, **document: object) -> str:
    spec = {"command": ["make", "it"], "labels": {"who": node.name}, **document}
    body = json.dumps(spec).encode()
    answer = api.ask("POST", "/api/v1/jobs", credential=api.owner, body=body, content_type="application/json")
    return str(json.loads(answer.content)["id"])


def read(api: Api, path: str) -> dict[str, Any]:
    answer = api.ask("GET", path, credential=api.owner)
    assert answer.status == 200, answer
    return json.loads(answer.content)


def ended(api: Api, job_id: str) -> dict[str, Any]:
    """Follow the job's events to its end, as anyone would who waits for it."""
    after = ""
    while True:
        cursor = f"&after={after}" if after else ""
        events = read(api, f"/api/v1/jobs/{job_id}/events?wait_seconds=30{cursor}")
        after = events["next"]
        job = read(api, f"/api/v1/jobs/{job_id}")
        if job["finished_at"] is not None:
            return job
        assert events["items"], "a job that runs comes to an end"


def entry(path: str, content: bytes) -> DeclaredArtifact:
    return DeclaredArtifact(path=path, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def small(path: str, content: bytes) -> InlineArtifact:
    said = entry(path, content)
    return InlineArtifact(path=path, size_bytes=said.size_bytes, sha256=said.sha256, content=content)


def given(node: Node, job_id: str) -> AssignmentOrder:
    """Wait for the job to be handed over."""
    while True:
        for order in node.sync(wait_seconds=30).assignments:
            if str(order.job_id) == job_id:
                return order


def test_a_job_is_done_and_its_bytes_are_those_that_the_node_brought(api: Api, node: Node) -> None:
    content = bytes(range(256)) * (3 * PIECE // 256) + b"the end"
    receipt = b'{"command": ["make", "it"]}'
    job_id = submit(api, node, artifacts=[{"path": "out/*.bin"}])
    order = given(node, job_id)
    node.sync(held=[HeldAssignment(id=order.id, fence=order.fence, state="running")])
    client = node.client
    assert client.append_log(order.id, fence=order.fence, offset=0, content=b"making\n").received_bytes == 7
    assert client.append_log(order.id, fence=order.fence, offset=0, content=b"making\nmade\n").received_bytes == 12
    declared = DeclareRequest(fence=order.fence, artifacts=[entry("out/a.bin", content), entry(RECEIPT_PATH, receipt)])
    client.declare_artifacts(order.id, declared)
    state = client.upload_artifact(
        order.id,
        fence=order.fence,
        path="out/a.bin",
        offset=0,
        content=iter([content[:PIECE], content[PIECE : 2 * PIECE]]),
    )
    assert (state.received_bytes, state.stored) == (2 * PIECE, False)
    with pytest.raises(RemoteRefusal) as caught:
        client.upload_artifact(order.id, fence=order.fence, path="out/a.bin", offset=7, content=b"x")
    assert code_of(caught.value) == "upload_offset"
    state = client.upload_artifact(
        order.id, fence=order.fence, path="out/a.bin", offset=2 * PIECE, content=content[2 * PIECE :]
    )
    assert (state.received_bytes, state.stored) == (len(content), True)
    client.upload_artifact(order.id, fence=order.fence, path=RECEIPT_PATH, offset=0, content=receipt)
    done = HeldAssignment(id=order.id, fence=order.fence, state="succeeded", exit_code=0, released=True)
    node.sync(held=[done])
    job = ended(api, job_id)
    assert (job["status"], job["winning_assignment_id"]) == ("completed", str(order.id))
    fetched = api.ask("GET", f"/api/v1/jobs/{job_id}/artifacts/content?path=out/a.bin", credential=api.owner)
    assert (fetched.status, fetched.headers["content-length"]) == (200, str(len(content)))
    assert fetched.content == content
    rest = api.ask(
        "GET", f"/api/v1/jobs/{job_id}/artifacts/content?path=out/a.bin&offset={PIECE}", credential=api.owner
    )
    assert rest.content == content[PIECE:]
    log = read(api, f"/api/v1/jobs/{job_id}/logs?wait_seconds=1")
    assert (log["content"], log["ended"]) == ("bWFraW5nCm1hZGUK", True)
    kinds = [event["kind"] for event in read(api, f"/api/v1/jobs/{job_id}/events")["items"]]
    assert kinds.index("assignment.verified") < kinds.index("job.completed")


def test_small_files_travel_inside_the_report(api: Api, node: Node) -> None:
    job_id = submit(api, node, artifacts=[{"path": "out.txt"}])
    order = given(node, job_id)
    inline = [small("out.txt", b"hi\n"), small(RECEIPT_PATH, b"{}")]
    node.sync(
        held=[
            HeldAssignment(id=order.id, fence=order.fence, state="succeeded", exit_code=0, released=True, inline=inline)
        ]
    )
    assert ended(api, job_id)["status"] == "completed"
    fetched = api.ask("GET", f"/api/v1/jobs/{job_id}/artifacts/content?path=out.txt", credential=api.owner)
    assert fetched.content == b"hi\n"


def test_a_blob_is_kept_under_its_digest_and_nothing_else(api: Api) -> None:
    content = b"an archive" * 100_000
    digest = hashlib.sha256(content).hexdigest()

    def put(sent: bytes, **more: Any) -> int:
        return api.ask("PUT", f"/api/v1/blobs/{digest}", credential=api.owner, body=sent, **more).status

    assert put(content) == 200
    assert put(content) == 200
    assert put(content[:-1] + b"x") == 422
    chunked = api.ask("PUT", f"/api/v1/blobs/{digest}", credential=api.owner, body=iter([content]))
    assert json.loads(chunked.content)["field"] == "content-length"
