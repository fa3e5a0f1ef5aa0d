"""ONE table: method, path, request, reply and required scope of every call.

Owns what can be called and what that needs. Routing, the client and the scope checks all read it.
Refuses to know how a call is served.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypedDict, Unpack

from fleetward.domain.jobs import JobSpec
from fleetward.wire import messages as m
from fleetward.wire.versions import API_PREFIX


class Access(Enum):
    """Who may call: anyone, a node by its session, or a user whose key has the endpoint's scope."""

    PUBLIC = "public"
    NODE = "node"
    USER = "user"


class Body(Enum):
    """How a body travels: a JSON document, raw bytes, or not at all."""

    NONE = "none"
    JSON = "json"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One call. `query` names the query parameters it takes; every other one is refused."""

    name: str
    method: str
    path: str
    access: Access
    reply: type
    scope: str = ""
    request: type | None = None
    query: tuple[str, ...] = ()
    request_body: Body = Body.NONE
    reply_body: Body = Body.JSON
    body_bytes_max: int = 1024 * 1024


class _More(TypedDict, total=False):
    scope: str
    request: type
    query: tuple[str, ...]
    request_body: Body
    reply_body: Body
    body_bytes_max: int


def _user(name: str, method: str, path: str, needed: str, reply: type, **more: Unpack[_More]) -> Endpoint:
    more["scope"] = needed
    return _endpoint(name, method, API_PREFIX + path, Access.USER, reply, **more)


def _node(name: str, method: str, path: str, reply: type, **more: Unpack[_More]) -> Endpoint:
    return _endpoint(name, method, API_PREFIX + "/agent" + path, Access.NODE, reply, **more)


def _public(name: str, method: str, path: str, reply: type, **more: Unpack[_More]) -> Endpoint:
    return _endpoint(name, method, path, Access.PUBLIC, reply, **more)


def _endpoint(name: str, method: str, path: str, access: Access, reply: type, **more: Unpack[_More]) -> Endpoint:
    if "request" in more:
        more.setdefault("request_body", Body.JSON)
    return Endpoint(name=name, method=method, path=path, access=access, reply=reply, **more)


CHUNK_BYTES_MAX: Final = 8 * 1024 * 1024  # one piece of an upload; a lost one costs no more than this
LOG_BYTES_MAX: Final = 1024 * 1024
SYNC_BYTES_MAX: Final = 4 * 1024 * 1024  # 1 MiB of inline files in base64, and room for the report around it
BLOB_BYTES_MAX: Final = 64 * 1024 * 1024 * 1024

ENDPOINTS: Final = (
    _public("healthz", "GET", "/healthz", m.Health),
    _public("readyz", "GET", "/readyz", m.Health),
    _public("version", "GET", "/version", m.Version),
    _public("pair", "POST", API_PREFIX + "/pair", m.PairReply, request=m.PairRequest),
    _public("challenge", "POST", API_PREFIX + "/agent/challenge", m.Challenge, request=m.ChallengeRequest),
    _public("open_session", "POST", API_PREFIX + "/agent/session", m.SessionReply, request=m.SessionRequest),
    _node("sync", "POST", "/sync", m.SyncReply, request=m.SyncRequest, body_bytes_max=SYNC_BYTES_MAX),
    _node(
        "append_log",
        "POST",
        "/assignments/{id}/logs",
        m.LogState,
        query=("fence", "offset"),
        request_body=Body.BYTES,
        body_bytes_max=LOG_BYTES_MAX,
    ),
    _node("declare_artifacts", "POST", "/assignments/{id}/artifacts", m.DeclareReply, request=m.DeclareRequest),
    _node(
        "upload_artifact",
        "PUT",
        "/assignments/{id}/artifacts",
        m.UploadState,
        query=("fence", "path", "offset"),
        request_body=Body.BYTES,
        body_bytes_max=CHUNK_BYTES_MAX,
    ),
    _node("read_input", "GET", "/blobs/{sha256}", bytes, query=("offset",), reply_body=Body.BYTES),
    _user(
        "make_pairing_code",
        "POST",
        "/pairing-codes",
        "pairing_code:create",
        m.PairingCode,
        request=m.PairingCodeRequest,
    ),
    _user("list_nodes", "GET", "/nodes", "node:read", m.NodeList, query=("limit", "after")),
    _user("show_node", "GET", "/nodes/{name}", "node:read", m.Node),
    _user("submit_job", "POST", "/jobs", "job:create", m.JobSubmitted, request=JobSpec),
    _user("list_jobs", "GET", "/jobs", "job:read", m.JobList, query=("limit", "after", "status")),
    _user("show_job", "GET", "/jobs/{id}", "job:read", m.Job),
    _user("cancel_job", "POST", "/jobs/{id}/cancel", "job:update", m.Job, request=m.CancelRequest),
    _user("list_assignments", "GET", "/jobs/{id}/assignments", "job:read", m.AssignmentList),
    _user("job_events", "GET", "/jobs/{id}/events", "job:read", m.Events, query=("after", "limit", "wait_seconds")),
    _user("job_log", "GET", "/jobs/{id}/logs", "job:read", m.Log, query=("assignment", "offset", "wait_seconds")),
    _user("list_artifacts", "GET", "/jobs/{id}/artifacts", "job:read", m.ArtifactList),
    _user(
        "read_artifact",
        "GET",
        "/jobs/{id}/artifacts/content",
        "job:read",
        bytes,
        query=("path", "offset"),
        reply_body=Body.BYTES,
    ),
    _user(
        "store_blob",
        "PUT",
        "/blobs/{sha256}",
        "blob:create",
        m.BlobStored,
        request_body=Body.BYTES,
        body_bytes_max=BLOB_BYTES_MAX,
    ),
    _user("status", "GET", "/status", "system:read", m.Status),
    _user("whoami", "GET", "/whoami", "system:read", m.Who),
)

BY_NAME: Final = {endpoint.name: endpoint for endpoint in ENDPOINTS}
