"""Minimal rows, as an outside tool would insert them, by any role that may."""

from collections.abc import Sequence
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg


def one(connection: psycopg.Connection, text: LiteralString, values: Sequence[object] = ()) -> Any:
    """The one value that a query gives."""
    row = connection.execute(text, values).fetchone()
    assert row is not None
    return row[0]


def node(connection: psycopg.Connection) -> UUID:
    return one(connection, "INSERT INTO compute_nodes (name) VALUES (%s) RETURNING id", [f"node-{uuid4().hex[:12]}"])


def job(connection: psycopg.Connection, *, quorum: int = 1) -> UUID:
    return one(connection, "INSERT INTO jobs (kind, spec, quorum) VALUES ('command', '{}', %s) RETURNING id", [quorum])


def assignment(connection: psycopg.Connection, *, job_id: UUID | None = None, node_id: UUID | None = None) -> UUID:
    return one(
        connection,
        "INSERT INTO job_assignments (job_id, node_id) VALUES (%s, %s) RETURNING id",
        [job_id or job(connection), node_id or node(connection)],
    )


def running_job(connection: psycopg.Connection, *, quorum: int = 1) -> UUID:
    id = job(connection, quorum=quorum)
    connection.execute("UPDATE jobs SET status = 'running' WHERE id = %s", [id])
    return id


def verify(connection: psycopg.Connection, assignment_id: UUID) -> None:
    """Write by hand, as only the tables' owner can, what the verification step writes."""
    connection.execute("UPDATE job_assignments SET state = 'succeeded' WHERE id = %s", [assignment_id])
    connection.execute("UPDATE job_assignments SET artifacts_verified_at = app.now() WHERE id = %s", [assignment_id])


def workspace(connection: psycopg.Connection) -> UUID:
    return one(connection, "INSERT INTO workspaces DEFAULT VALUES RETURNING id")


def build(connection: psycopg.Connection, workspace_id: UUID, number: int = 1) -> UUID:
    """A build with its job, the earlier ones of the workspace ended."""
    connection.execute(
        "UPDATE jobs SET status = 'cancelled' FROM workspace_builds AS build"
        " WHERE build.job_id = jobs.id AND build.workspace_id = %s AND build.ended_at IS NULL",
        [workspace_id],
    )
    return one(
        connection,
        "INSERT INTO workspace_builds (workspace_id, build_number, transition, job_id)"
        " VALUES (%s, %s, 'stop', %s) RETURNING id",
        [workspace_id, number, one(connection, "INSERT INTO jobs (kind) VALUES ('workspace_build') RETURNING id")],
    )


def orchestration(connection: psycopg.Connection) -> UUID:
    """A pending intent whose workspace has a second build that could be its child."""
    place = workspace(connection)
    parent = build(connection, place)
    build(connection, place, 2)
    return one(
        connection,
        "INSERT INTO workspace_build_orchestrations (workspace_id, parent_build_id, child_transition)"
        " VALUES (%s, %s, 'start') RETURNING id",
        [place, parent],
    )


def template_version(connection: psycopg.Connection) -> UUID:
    template = one(connection, "INSERT INTO templates (name) VALUES (%s) RETURNING id", [uuid4().hex])
    return one(connection, "INSERT INTO template_versions (template_id) VALUES (%s) RETURNING id", [template])


def preset(connection: psycopg.Connection, version_id: UUID, parameters: str = "[]") -> UUID:
    return one(
        connection,
        "INSERT INTO template_version_presets (template_version_id, parameters) VALUES (%s, %s) RETURNING id",
        [version_id, parameters],
    )


def artifact(connection: psycopg.Connection, assignment_id: UUID, path: str, *, sha256: str | None = None) -> UUID:
    """A declared and stored artifact whose blob is there; without a digest, the receipt."""
    digest = sha256 or uuid4().hex * 2
    connection.execute("INSERT INTO blobs (sha256) VALUES (%s) ON CONFLICT DO NOTHING", [digest])
    id = one(
        connection,
        "INSERT INTO job_artifacts (job_id, assignment_id, path, sha256, is_receipt)"
        " SELECT job_id, id, %s, %s, %s FROM job_assignments WHERE id = %s RETURNING id",
        [path, digest, sha256 is None, assignment_id],
    )
    connection.execute("UPDATE job_artifacts SET state = 'stored', stored_at = app.now() WHERE id = %s", [id])
    return id


def succeeded(connection: psycopg.Connection, job_id: UUID, *, files: dict[str, str] | None = None) -> UUID:
    """A succeeded attempt on a node of its own, with a receipt and these files stored."""
    id = assignment(connection, job_id=job_id)
    artifact(connection, id, ".fleetward/receipt.json")
    for path, digest in (files or {}).items():
        artifact(connection, id, path, sha256=digest)
    connection.execute("UPDATE job_assignments SET state = 'succeeded' WHERE id = %s", [id])
    return id


def record(connection: psycopg.Connection, assignment_id: UUID, verdict: str = "verified", checks: str = "[]") -> str:
    return one(
        connection,
        "SELECT app.record_verification(id, fence, %s, %s, 'a test') FROM job_assignments WHERE id = %s",
        [verdict, checks, assignment_id],
    )
