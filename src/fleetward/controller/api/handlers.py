"""The table from endpoints to services: one handler for every name in `wire.endpoints`.

Owns which service answers which endpoint, and who is woken by it. Refuses to know HTTP, SQL and policy.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from fleetward.controller.api.context import Answering, Call, Context, Handler, Holding, Receiving, Sending, Sent
from fleetward.controller.api.requests import needed
from fleetward.controller.hints import ASSIGN, JOBS, assignment_topic, job_topic, node_topic
from fleetward.controller.services import artifacts, jobs, logs, nodes, pairing, sessions
from fleetward.controller.services.sync import SyncCall
from fleetward.domain.access import ALL_SCOPES
from fleetward.domain.errors import MalformedRequest
from fleetward.domain.ids import AssignmentId, JobId, NodeId
from fleetward.domain.jobs import JobSpec
from fleetward.wire import messages as m
from fleetward.wire.endpoints import Access, Body, Endpoint
from fleetward.wire.versions import API_PREFIX, VERSION


def _healthz(_context: Context, _call: Call) -> m.Health:
    return m.Health(status="ok")


def _readyz(context: Context, _call: Call) -> m.Health:
    with context.database.begin() as tx:
        assert tx.now is not None, "the database tells the time"
    return m.Health(status="ready", checks={"database": "ok"})


def _version(_context: Context, _call: Call) -> m.Version:
    return m.Version(version=VERSION, api=API_PREFIX.rpartition("/")[2])


def _pair(context: Context, call: Call) -> m.PairReply:
    identity = context.identity
    return pairing.pair(
        context.database,
        call.body(m.PairRequest),
        pin=identity.pin,
        sign=identity.sign,
        controller_public=identity.public_key,
    )


def _make_pairing_code(context: Context, call: Call) -> m.PairingCode:
    identity = context.identity
    return pairing.make_code(
        context.database, call.body(m.PairingCodeRequest), url=identity.url, pin=identity.pin, by=call.by()
    )


def _challenge(context: Context, call: Call) -> m.Challenge:
    node_id = NodeId(call.body(m.ChallengeRequest).node_id)
    return sessions.challenge(context.database, node_id=node_id, token_key=context.identity.token_key)


def _open_session(context: Context, call: Call) -> m.SessionReply:
    return sessions.open_session(context.database, call.body(m.SessionRequest), token_key=context.identity.token_key)


async def _sync(context: Context, call: Call) -> m.SyncReply:
    return await context.syncs.sync(SyncCall(credential=call.credential(), request=call.body(m.SyncRequest)))


def _append_log(context: Context, call: Call, pieces: Iterable[bytes]) -> m.LogState:
    needed(call.query.fence, name="fence")
    assignment_id = AssignmentId(call.id())
    state = logs.append(
        context.database,
        call.credential(),
        assignment_id=assignment_id,
        fence=call.query.fence or 0,
        offset=call.query.offset,
        content=b"".join(pieces),
    )
    context.hub.wake({assignment_topic(assignment_id)})
    return state


def _declare_artifacts(context: Context, call: Call) -> m.DeclareReply:
    return artifacts.declare(
        context.database,
        call.credential(),
        assignment_id=AssignmentId(call.id()),
        request=call.body(m.DeclareRequest),
        blobs=context.blobs,
    )


def _upload_artifact(context: Context, call: Call, pieces: Iterable[bytes]) -> m.UploadState:
    needed(call.query.fence, name="fence")
    needed(call.query.path, name="path")
    return artifacts.upload(
        context.database,
        call.credential(),
        assignment_id=AssignmentId(call.id()),
        fence=call.query.fence or 0,
        path=call.query.path or "",
        offset=call.query.offset,
        chunks=pieces,
        blobs=context.blobs,
    )


def _read_input(context: Context, call: Call) -> Sent:
    pieces = artifacts.open_input(
        context.database,
        call.credential(),
        sha256=call.params["sha256"],
        blobs=context.blobs,
        offset=call.query.offset,
    )
    return Sent(None, pieces)


def _read_artifact(context: Context, call: Call) -> Sent:
    needed(call.query.path, name="path")
    size_bytes, pieces = artifacts.open_artifact(
        context.database,
        job_id=JobId(call.id()),
        path=call.query.path or "",
        blobs=context.blobs,
        offset=call.query.offset,
    )
    return Sent(max(0, size_bytes - call.query.offset), pieces)


def _store_blob(context: Context, call: Call, pieces: Iterable[bytes]) -> m.BlobStored:
    if call.size_bytes is None:
        raise MalformedRequest(
            "the size of the bytes is not said; room for them must be found first",
            hint="send Content-Length",
            field="content-length",
        )
    return artifacts.store_blob(
        context.database,
        by=call.by(),
        sha256=call.params["sha256"],
        chunks=pieces,
        size_bytes=call.size_bytes,
        blobs=context.blobs,
    )


def _list_nodes(context: Context, call: Call) -> m.NodeList:
    return nodes.listing(context.database, limit=call.query.limit, after=call.query.after)


def _show_node(context: Context, call: Call) -> m.Node:
    return nodes.show(context.database, call.params["name"])


def _submit_job(context: Context, call: Call) -> m.JobSubmitted:
    submitted = jobs.submit(context.database, call.body(JobSpec), by=call.by(), idempotency_key=call.idempotency_key)
    context.hub.wake({ASSIGN})
    return submitted


def _list_jobs(context: Context, call: Call) -> m.JobList:
    query = call.query
    return jobs.listing(context.database, limit=query.limit, after=query.after, status=query.status)


def _show_job(context: Context, call: Call) -> m.Job:
    return jobs.show(context.database, JobId(call.id()))


def _cancel_job(context: Context, call: Call) -> m.Job:
    job_id = JobId(call.id())
    job = jobs.cancel(context.database, job_id, request=call.body(m.CancelRequest), by=call.by())
    holders = jobs.assignments(context.database, job_id).items
    told = {node_topic(NodeId(held.node_id)) for held in holders if held.released_at is None}
    context.hub.wake({ASSIGN, JOBS, job_topic(job_id), *told})
    return job


def _list_assignments(context: Context, call: Call) -> m.AssignmentList:
    return jobs.assignments(context.database, JobId(call.id()))


def _list_artifacts(context: Context, call: Call) -> m.ArtifactList:
    return jobs.artifacts(context.database, JobId(call.id()))


async def _job_events(context: Context, call: Call) -> m.Events:
    job_id = JobId(call.id())

    def look() -> m.Events:
        call.recheck()
        return jobs.events(context.database, job_id, after=call.query.after or "", limit=call.query.limit)

    return await context.holds.hold(
        look,
        is_news=lambda events: bool(events.items),
        topics=lambda _events: (job_topic(job_id),),
        wait_seconds=call.query.wait_seconds,
    )


async def _job_log(context: Context, call: Call) -> m.Log:
    job_id = JobId(call.id())
    asked = None if call.query.assignment is None else AssignmentId(call.query.assignment)

    def look() -> m.Log:
        call.recheck()
        return logs.read(
            context.database,
            job_id=job_id,
            assignment_id=asked,
            offset=call.query.offset,
        )

    return await context.holds.hold(
        look,
        is_news=lambda log: log.ended or bool(log.content),
        topics=_log_topics,
        wait_seconds=call.query.wait_seconds,
    )


def _log_topics(log: m.Log) -> tuple[str, ...]:
    return () if log.assignment_id is None else (assignment_topic(AssignmentId(log.assignment_id)),)


def _status(context: Context, _call: Call) -> m.Status:
    return nodes.status(context.database, rhythm=context.rhythm())


def _whoami(_context: Context, call: Call) -> m.Who:
    caller = call.caller()
    return m.Who(user_id=caller.user_id, name=caller.name, scopes=sorted(caller.scopes))


HANDLERS: Final[Mapping[str, Handler]] = {
    "healthz": Answering(_healthz),
    "readyz": Answering(_readyz),
    "version": Answering(_version),
    "pair": Answering(_pair),
    "challenge": Answering(_challenge),
    "open_session": Answering(_open_session),
    "sync": Holding(_sync),
    "append_log": Receiving(_append_log),
    "declare_artifacts": Answering(_declare_artifacts),
    "upload_artifact": Receiving(_upload_artifact),
    "read_input": Sending(_read_input),
    "make_pairing_code": Answering(_make_pairing_code),
    "list_nodes": Answering(_list_nodes),
    "show_node": Answering(_show_node),
    "submit_job": Answering(_submit_job),
    "list_jobs": Answering(_list_jobs),
    "show_job": Answering(_show_job),
    "cancel_job": Answering(_cancel_job),
    "list_assignments": Answering(_list_assignments),
    "job_events": Holding(_job_events),
    "job_log": Holding(_job_log),
    "list_artifacts": Answering(_list_artifacts),
    "read_artifact": Sending(_read_artifact),
    "store_blob": Receiving(_store_blob),
    "status": Answering(_status),
    "whoami": Answering(_whoami),
}


def check_table(endpoints: Iterable[Endpoint], handlers: Mapping[str, Handler]) -> None:
    """Fail at start unless every endpoint has a handler of its kind, and every user's endpoint a scope."""
    by_name = {endpoint.name: endpoint for endpoint in endpoints}
    unserved = by_name.keys() ^ handlers.keys()
    assert not unserved, f"endpoints and handlers differ: {sorted(unserved)}"
    for name, endpoint in by_name.items():
        has_scope = endpoint.scope in ALL_SCOPES
        assert has_scope == (endpoint.access is Access.USER), (
            f"endpoint {name} needs a scope if and only if users call it"
        )
        takes_bytes = isinstance(handlers[name], Receiving)
        assert takes_bytes == (endpoint.request_body is Body.BYTES), (
            f"endpoint {name} takes another body than its handler"
        )
        gives_bytes = isinstance(handlers[name], Sending)
        assert gives_bytes == (endpoint.reply_body is Body.BYTES), (
            f"endpoint {name} gives another body than its handler"
        )
