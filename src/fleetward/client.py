"""Typed calls to a controller, one method per row of `wire.endpoints`.

Owns the connection: the pool, time limits, safe repeats, certificates and pins, and the way back from
a problem document to an exception. Refuses to know what a caller does with an answer.
"""

import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar, cast, final
from urllib.parse import quote, urlencode, urlsplit
from uuid import UUID

import msgspec
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, Timeout
from urllib3.connection import HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

from fleetward.domain.errors import InvalidSetting, Unreachable, WrongPin, quoted
from fleetward.domain.jobs import JobSpec
from fleetward.wire import messages as m
from fleetward.wire.endpoints import BY_NAME, Endpoint
from fleetward.wire.problem import MEDIA_TYPE, Problem, RemoteFault, RemoteRefusal, error_of
from fleetward.wire.versions import VERSION

CONNECT_LIMIT: Final = timedelta(seconds=5)  # a machine that takes longer to greet is not there
ANSWER_LIMIT: Final = timedelta(seconds=30)  # the controller's own statement limits end well before
POOL_MAX: Final = 16  # connections kept for reuse; more are opened when needed and closed after
REPEAT_MAX: Final = 2  # further tries of a call that may be repeated
REPEAT_DELAY: Final = timedelta(milliseconds=200)  # doubled each time
REPEATABLE_STATUS: Final = frozenset({502, 503, 504})
REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
UNTRUSTED: Final = "its certificate is not trusted"
PIECE_BYTES: Final = 256 * 1024

R = TypeVar("R")
Query = Mapping[str, str | int | float | UUID | None]


@final
class Download:
    """Bytes on their way. Iterate to read them; leave the `with` block to give the connection back."""

    __slots__ = ("_pool", "_response", "size_bytes")

    def __init__(self, response: BaseHTTPResponse, *, pool: "_Pool") -> None:
        self._response = response
        self._pool = pool
        length = response.headers.get("content-length", "")
        self.size_bytes: int | None = int(length) if length.isdecimal() else None

    def __enter__(self) -> "Download":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._response.stream(PIECE_BYTES, decode_content=False)
        except (HTTPError, OSError) as error:
            raise self._pool.unreachable(error) from error

    def close(self) -> None:
        """Give the connection back, or drop it when bytes are still under way."""
        self._response.close()


@dataclass(frozen=True, slots=True)
class _Pool:
    """The connections to one controller; clients with other tokens share them."""

    url: str
    path: str
    connections: HTTPConnectionPool

    def unreachable(self, error: BaseException) -> Unreachable:
        """Say that the controller cannot be reached, and why."""
        reason = _reason(error)
        hint = "check that it runs there (`fleetward up`), and the URL (`--url`, FLEETWARD_URL)"
        if reason.startswith(UNTRUSTED):
            hint = "if it made its certificate itself, name its key: FLEETWARD_PIN=… (`pin` in its controller.json)"
        return Unreachable(f"no answer from the controller at {self.url}: {reason}", hint=hint)


def _reason(error: BaseException) -> str:
    """The innermost cause, without the object addresses that libraries put in front of it."""
    causes = [error.__cause__, *error.args]
    inner = next((cause for cause in causes if isinstance(cause, BaseException)), None)
    if inner is not None:
        return _reason(inner)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{UNTRUSTED}: {error.verify_message}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).rsplit(": ", 1)[-1].lower() or type(error).__name__


def _open_pool(url: str, *, pin: str, ca: Path | None) -> _Pool:
    parts = urlsplit(url.rstrip("/"))
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise InvalidSetting(
            f"{quoted(url)} is no controller URL",
            hint="give one like http://127.0.0.1:7400 or https://fleet.example.org",
            field="url",
        )
    if parts.scheme == "http":
        connections = HTTPConnectionPool(parts.hostname, parts.port, maxsize=POOL_MAX)
    else:
        context = ssl.create_default_context(cafile=ca) if not pin else _trusting_context()
        connections = HTTPSConnectionPool(parts.hostname, parts.port, maxsize=POOL_MAX, ssl_context=context)
        if pin:
            connections.ConnectionCls = cast("Any", _pinned(url, pin=pin))
    return _Pool(url=url.rstrip("/"), path=parts.path, connections=connections)


def _trusting_context() -> ssl.SSLContext:
    """A context that takes any certificate: with a pin, the key alone decides."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _pinned(url: str, *, pin: str) -> type[HTTPSConnection]:
    @final
    class Pinned(HTTPSConnection):
        """Compares the server's key with the pin after the handshake, before any byte of a request."""

        def connect(self) -> None:
            super().connect()
            certificate = self.sock.getpeercert(binary_form=True) if isinstance(self.sock, ssl.SSLSocket) else None
            found = _pin_of_certificate(certificate or b"")
            if found != pin:
                self.close()
                raise WrongPin(
                    f"the controller at {url} has the key {found}, and not the expected {pin}",
                    hint="make sure that nothing stands between; a new join string (`fleetward node pair`) has its pin",
                )
            self.is_verified = True

    return Pinned


def _pin_of_certificate(certificate: bytes) -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from fleetward.wire.handshake import pin_of

    key = x509.load_der_x509_certificate(certificate).public_key()
    return pin_of(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


@final
class Client:
    """A controller, as typed calls. Safe to share between threads.

    Every call raises `RemoteRefusal` or `RemoteFault` with the controller's own words, `Unreachable`
    when there was no answer, and `WrongPin` when another server answered. Calls that may be repeated
    (reads, and what carries an idempotency key) are, up to `repeat_max` times.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        pin: str = "",
        ca: Path | None = None,
        answer_limit: timedelta = ANSWER_LIMIT,
        repeat_max: int = REPEAT_MAX,
        pool: _Pool | None = None,
    ) -> None:
        self._pool = pool or _open_pool(url, pin=pin, ca=ca)
        self._token = token
        self._answer_limit = answer_limit
        self._repeat_max = repeat_max

    @property
    def url(self) -> str:
        """The controller's URL."""
        return self._pool.url

    def with_token(self, token: str) -> "Client":
        """Return a client that shares this one's connections and carries another token."""
        return Client(
            self.url, token=token, answer_limit=self._answer_limit, repeat_max=self._repeat_max, pool=self._pool
        )

    def close(self) -> None:
        """Close all connections that are not in use."""
        self._pool.connections.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # The controller itself

    def healthz(self) -> m.Health:
        """Ask whether the process lives."""
        return self._ask("healthz", m.Health)

    def readyz(self) -> m.Health:
        """Ask whether the controller can do its work; it refuses with 503 while it cannot."""
        return self._ask("readyz", m.Health)

    def version(self) -> m.Version:
        """Ask what runs there."""
        return self._ask("version", m.Version)

    def status(self) -> m.Status:
        """Read the fleet in numbers."""
        return self._ask("status", m.Status)

    def whoami(self) -> m.Who:
        """Ask whom this client's token proves."""
        return self._ask("whoami", m.Who)

    # Pairing and sessions

    def pair(self, request: m.PairRequest) -> m.PairReply:
        """Turn this machine into a node. The same key under the same code gets the same node again."""
        return self._ask("pair", m.PairReply, body=request)

    def challenge(self, request: m.ChallengeRequest) -> m.Challenge:
        """Ask for a challenge to sign."""
        return self._ask("challenge", m.Challenge, body=request)

    def open_session(self, request: m.SessionRequest) -> m.SessionReply:
        """Open a session. The same nonce gets the same answer."""
        return self._ask("open_session", m.SessionReply, body=request)

    def make_pairing_code(self, request: m.PairingCodeRequest, *, idempotency_key: str | None = None) -> m.PairingCode:
        """Make a one-time code; its join string is shown this once."""
        return self._ask("make_pairing_code", m.PairingCode, body=request, idempotency_key=idempotency_key)

    # A node's work

    def sync(self, request: m.SyncRequest) -> m.SyncReply:
        """Say all that this node holds and learn all that it should hold; may be held for `wait_seconds`."""
        return self._ask("sync", m.SyncReply, body=request, wait_seconds=request.wait_seconds)

    def append_log(self, assignment_id: UUID, *, fence: int, offset: int, content: bytes) -> m.LogState:
        """Append to an attempt's log at `offset`."""
        query: Query = {"fence": fence, "offset": offset}
        return self._ask("append_log", m.LogState, ids={"id": assignment_id}, query=query, content=content)

    def declare_artifacts(self, assignment_id: UUID, request: m.DeclareRequest) -> m.DeclareReply:
        """Declare the files of an attempt and learn where each upload goes on."""
        return self._ask("declare_artifacts", m.DeclareReply, ids={"id": assignment_id}, body=request)

    def upload_artifact(
        self, assignment_id: UUID, *, fence: int, path: str, offset: int, content: bytes | Iterable[bytes]
    ) -> m.UploadState:
        """Upload a piece of a declared file from `offset`, at most `CHUNK_BYTES_MAX`."""
        query: Query = {"fence": fence, "path": path, "offset": offset}
        return self._ask("upload_artifact", m.UploadState, ids={"id": assignment_id}, query=query, content=content)

    def read_input(self, sha256: str, *, offset: int = 0) -> Download:
        """Read an input of an assignment that this node holds."""
        return self._download("read_input", ids={"sha256": sha256}, query={"offset": offset})

    # Nodes

    def list_nodes(self, *, limit: int | None = None, after: str | None = None) -> m.NodeList:
        """Read a page of nodes by name."""
        return self._ask("list_nodes", m.NodeList, query={"limit": limit, "after": after})

    def show_node(self, name: str) -> m.Node:
        """Read one node."""
        return self._ask("show_node", m.Node, ids={"name": name})

    # Jobs

    def submit_job(self, request: JobSpec, *, idempotency_key: str | None = None) -> m.JobSubmitted:
        """Submit a job. The same key with the same document gets the same job again."""
        return self._ask("submit_job", m.JobSubmitted, body=request, idempotency_key=idempotency_key)

    def list_jobs(self, *, limit: int | None = None, after: str | None = None, status: str | None = None) -> m.JobList:
        """Read a page of jobs, newest first."""
        return self._ask("list_jobs", m.JobList, query={"limit": limit, "after": after, "status": status})

    def show_job(self, job_id: UUID) -> m.Job:
        """Read one job."""
        return self._ask("show_job", m.Job, ids={"id": job_id})

    def cancel_job(self, job_id: UUID, request: m.CancelRequest, *, idempotency_key: str | None = None) -> m.Job:
        """Ask for a job to be cancelled; its attempts stay open until their nodes report."""
        return self._ask("cancel_job", m.Job, ids={"id": job_id}, body=request, idempotency_key=idempotency_key)

    def list_assignments(self, job_id: UUID) -> m.AssignmentList:
        """Read all attempts of a job."""
        return self._ask("list_assignments", m.AssignmentList, ids={"id": job_id})

    def job_events(
        self, job_id: UUID, *, after: str | None = None, limit: int | None = None, wait_seconds: float = 0.0
    ) -> m.Events:
        """Read a job's events after a cursor; with `wait_seconds`, wait that long for a first one."""
        query: Query = {"after": after, "limit": limit, "wait_seconds": wait_seconds or None}
        return self._ask("job_events", m.Events, ids={"id": job_id}, query=query, wait_seconds=wait_seconds)

    def job_log(
        self, job_id: UUID, *, assignment: UUID | None = None, offset: int = 0, wait_seconds: float = 0.0
    ) -> m.Log:
        """Read an attempt's log from `offset` (the newest attempt's by default)."""
        query: Query = {"assignment": assignment, "offset": offset, "wait_seconds": wait_seconds or None}
        return self._ask("job_log", m.Log, ids={"id": job_id}, query=query, wait_seconds=wait_seconds)

    def list_artifacts(self, job_id: UUID) -> m.ArtifactList:
        """Read all artifacts of a job, the winner's first."""
        return self._ask("list_artifacts", m.ArtifactList, ids={"id": job_id})

    def read_artifact(self, job_id: UUID, *, path: str, offset: int = 0) -> Download:
        """Read a verified artifact of a completed job from `offset`."""
        return self._download("read_artifact", ids={"id": job_id}, query={"path": path, "offset": offset})

    def store_blob(self, sha256: str, *, size_bytes: int, content: bytes | Iterable[bytes]) -> m.BlobStored:
        """Hand the controller bytes that a job will name as input; room for `size_bytes` is found first."""
        ids = {"sha256": sha256}
        return self._ask("store_blob", m.BlobStored, ids=ids, content=content, size_bytes=size_bytes)

    # How a call travels

    def _ask(
        self,
        name: str,
        reply: type[R],
        *,
        ids: Mapping[str, str | UUID] | None = None,
        query: Query | None = None,
        body: msgspec.Struct | None = None,
        content: bytes | Iterable[bytes] | None = None,
        size_bytes: int | None = None,
        idempotency_key: str | None = None,
        wait_seconds: float = 0.0,
    ) -> R:
        endpoint = BY_NAME[name]
        headers = self._headers()
        if body is not None:
            headers["content-type"] = "application/json"
            content = msgspec.json.encode(body)
        elif content is not None:
            headers["content-type"] = "application/octet-stream"
        if size_bytes is not None:
            headers["content-length"] = str(size_bytes)
        if idempotency_key is not None:
            headers["idempotency-key"] = idempotency_key
        may_repeat = endpoint.method == "GET" or idempotency_key is not None
        target = self._target(endpoint, ids or {}, query or {})

        def once() -> bytes:
            response = self._send(endpoint, target, headers, content, wait_seconds=wait_seconds)
            return self._read_all(response)

        raw = self._repeated(once) if may_repeat else once()
        try:
            return msgspec.json.decode(raw, type=reply)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._foreign(f"its answer to {name} cannot be read: {error}") from error

    def _download(self, name: str, *, ids: Mapping[str, str | UUID], query: Query) -> Download:
        endpoint = BY_NAME[name]
        target = self._target(endpoint, ids, query)
        response = self._repeated(lambda: self._send(endpoint, target, self._headers(), None, wait_seconds=0.0))
        return Download(response, pool=self._pool)

    def _headers(self) -> dict[str, str]:
        headers = {"user-agent": f"fleetward/{VERSION}", "accept": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        return headers

    def _target(self, endpoint: Endpoint, ids: Mapping[str, str | UUID], query: Query) -> str:
        path = endpoint.path.format_map({key: quote(str(value), safe="") for key, value in ids.items()})
        asked = urlencode({key: value for key, value in query.items() if value is not None})
        return self._pool.path + path + ("?" + asked if asked else "")

    def _repeated(self, once: Callable[[], R]) -> R:
        delay = REPEAT_DELAY
        for _ in range(self._repeat_max):
            try:
                return once()
            except Unreachable:
                pass
            except RemoteFault as fault:
                if fault.problem.status not in REPEATABLE_STATUS:
                    raise
            time.sleep(delay.total_seconds())
            delay *= 2
        return once()

    def _send(
        self,
        endpoint: Endpoint,
        target: str,
        headers: Mapping[str, str],
        content: bytes | Iterable[bytes] | None,
        *,
        wait_seconds: float,
    ) -> BaseHTTPResponse:
        limit = self._answer_limit.total_seconds() + wait_seconds
        try:
            response = self._pool.connections.urlopen(
                endpoint.method,
                target,
                body=content,
                headers=headers,
                retries=False,
                redirect=False,
                preload_content=False,
                timeout=Timeout(connect=CONNECT_LIMIT.total_seconds(), read=limit),
            )
        except (HTTPError, OSError) as error:
            raise self._pool.unreachable(error) from error
        if response.status // 100 != 2:
            raise self._problem(response)
        return response

    def _read_all(self, response: BaseHTTPResponse) -> bytes:
        try:
            raw = response.read(REPLY_BYTES_MAX + 1)
        except (HTTPError, OSError) as error:
            raise self._pool.unreachable(error) from error
        if len(raw) > REPLY_BYTES_MAX:
            response.close()
            raise self._foreign(f"its answer is larger than {REPLY_BYTES_MAX} bytes")
        response.release_conn()
        return raw

    def _problem(self, response: BaseHTTPResponse) -> RemoteRefusal | RemoteFault:
        raw = self._read_all(response)
        if response.headers.get("content-type", "").startswith(MEDIA_TYPE):
            try:
                return error_of(msgspec.json.decode(raw, type=Problem))
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass
        return self._foreign(f"it answered {response.status} without saying why", status=response.status)

    def _foreign(self, what: str, *, status: int = 502) -> RemoteRefusal | RemoteFault:
        """Something answered, but not in a controller's way."""
        return error_of(
            Problem(
                code="unexpected_answer",
                status=status,
                title="unexpected answer",
                detail=f"what answers at {self.url} is no controller of this version: {what}",
                hint="check the URL (`--url`, FLEETWARD_URL)",
            )
        )
