"""What can go wrong, as types.

Owns every refusal (the caller can act) and fault (the world failed) with its permanent code. Refuses
to know how an error reaches anyone: HTTP bodies are made in `wire.problem`, exit statuses in `cli`.
"""

from typing import ClassVar

QUOTE_MAX = 80  # characters of somebody's input that a message repeats


def quoted(value: object) -> str:
    """Quote input for a message, cut so that a hostile value cannot fill a log."""
    text = repr(value)
    return text if len(text) <= QUOTE_MAX else text[: QUOTE_MAX - 1] + "…"


class Refusal(Exception):
    """The caller asked for something that is not to be had, and can act on the message."""

    code: ClassVar[str] = "refused"
    status: ClassVar[int] = 400

    def __init__(self, message: str, *, hint: str = "", field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field


class Fault(Exception):
    """The world failed (disk, database, network); the same call may succeed later."""

    code: ClassVar[str] = "fault"
    status: ClassVar[int] = 503

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


# Requests


class MalformedRequest(Refusal):
    """The body, a parameter or a header does not have the form the endpoint takes."""

    code = "malformed_request"
    status = 400


class RequestTooLarge(Refusal):
    """The body is larger than the endpoint takes."""

    code = "request_too_large"
    status = 413


class UnknownRoute(Refusal):
    """No endpoint has this path."""

    code = "unknown_route"
    status = 404


class MethodNotAllowed(Refusal):
    """The path exists, but not with this method."""

    code = "method_not_allowed"
    status = 405


class Unauthenticated(Refusal):
    """No credential, or one that proves nobody."""

    code = "unauthenticated"
    status = 401


class Forbidden(Refusal):
    """The credential is good, but does not reach this far."""

    code = "forbidden"
    status = 403


class Unreachable(Fault):
    """The controller could not be reached, or did not answer in time."""

    code = "unreachable"
    status = 503


class WrongPin(Refusal):
    """The server's public key is not the one the join string names."""

    code = "wrong_pin"
    status = 400


class IdempotencyKeyReused(Refusal):
    """The same idempotency key came with another body."""

    code = "idempotency_key_reused"
    status = 422


class PreconditionFailed(Refusal):
    """The thing is no longer in the state that the caller expected."""

    code = "precondition_failed"
    status = 412


# Pairing and sessions


class MalformedJoinString(Refusal):
    """The join string was cut, mistyped or made by another program."""

    code = "malformed_join_string"
    status = 400


class PairingRefused(Refusal):
    """The code is unknown, expired, used or burned; the caller is not told which."""

    code = "pairing_refused"
    status = 403


class NodeExists(Refusal):
    """A living node already has that name."""

    code = "node_exists"
    status = 409


class NodeRemoved(Refusal):
    """The node was removed for good; its credential proves only whom this answer is for."""

    code = "node_removed"
    status = 410


class NameRemoved(Refusal):
    """A machine tries to pair under the name of a removed node."""

    code = "node_removed"
    status = 409


class NodeNotFound(Refusal):
    """No node has that name or id."""

    code = "node_not_found"
    status = 404


class NodeNameNeeded(Refusal):
    """The machine has no network interface to take a name from."""

    code = "node_name_needed"
    status = 400


class SessionStale(Refusal):
    """A newer session of the same node exists, or the token has aged."""

    code = "session_stale"
    status = 401


class NodeCloned(Refusal):
    """Two machines present the same node's state; the node is fenced until it is re-keyed."""

    code = "node_cloned"
    status = 409


class IdentityMismatch(Refusal):
    """The call names another node than its credential proves."""

    code = "identity_mismatch"
    status = 403


class AgentTooOld(Refusal):
    """The agent speaks a version that this controller no longer understands."""

    code = "agent_too_old"
    status = 426


# Jobs, assignments, artifacts


class InvalidJob(Refusal):
    """The job document says something that cannot be run."""

    code = "invalid_job"
    status = 400


class JobNotFound(Refusal):
    """No job has that id."""

    code = "job_not_found"
    status = 404


class JobEnded(Refusal):
    """The job has already ended."""

    code = "job_ended"
    status = 409


class AssignmentLost(Refusal):
    """The assignment is no longer this node's to report on."""

    code = "assignment_lost"
    status = 409


class ArtifactNotFound(Refusal):
    """No artifact with that path is held for the job."""

    code = "artifact_not_found"
    status = 404


class ArtifactConflict(Refusal):
    """That artifact was declared before with other bytes; artifacts are write-once."""

    code = "artifact_conflict"
    status = 409


class UnsafePath(Refusal):
    """A path that is absolute, climbs out, or cannot be written the same way everywhere."""

    code = "unsafe_path"
    status = 400


class UnsafeArchive(Refusal):
    """An archive entry that would leave the folder it is unpacked in, or is no plain file."""

    code = "unsafe_archive"
    status = 400


class UploadOffset(Refusal):
    """An upload went on at another offset than the bytes that are there."""

    code = "upload_offset"
    status = 409


class DigestMismatch(Refusal):
    """The bytes that arrived are not the bytes that were declared."""

    code = "digest_mismatch"
    status = 422


class SizeMismatch(Refusal):
    """More or fewer bytes arrived than were declared."""

    code = "size_mismatch"
    status = 422


class MalformedDigest(Refusal):
    """A SHA-256 is 64 lowercase hex digits."""

    code = "malformed_digest"
    status = 400


class BlobNotFound(Refusal):
    """No stored bytes have that digest, or they are not yours to read."""

    code = "blob_not_found"
    status = 404


class SandboxUnavailable(Refusal):
    """The job requires a sandbox and this machine cannot give one."""

    code = "sandbox_unavailable"
    status = 409


class OutputExists(Refusal):
    """A fetch would overwrite what is already on this disk."""

    code = "output_exists"
    status = 409


# The house itself


class IllegalMove(Refusal):
    """The database refused a move that the lifecycle does not have."""

    code = "illegal_move"
    status = 409


class HomeLocked(Refusal):
    """Another process already runs on this home."""

    code = "home_locked"
    status = 409


class HomeUnusable(Refusal):
    """The home folder cannot hold what it must."""

    code = "home_unusable"
    status = 400


class ClusterVersion(Refusal):
    """The data folder was written by another major version of PostgreSQL."""

    code = "cluster_version"
    status = 409


class SchemaVersion(Refusal):
    """The database's schema is newer than this program, or was not made by it."""

    code = "schema_version"
    status = 409


class ServiceRoleTooStrong(Refusal):
    """The service's database role could undo the rules that the database keeps."""

    code = "service_role_too_strong"
    status = 403


class KeyringMismatch(Refusal):
    """The keyring in this home is not the one that the database was made with."""

    code = "keyring_mismatch"
    status = 409


class InvalidSetting(Refusal):
    """A setting has a value that it cannot have."""

    code = "invalid_setting"
    status = 400


class DatabaseUnavailable(Fault):
    """PostgreSQL did not answer, refused the connection or broke it off."""

    code = "database_unavailable"


class OutcomeUnknown(Fault):
    """The connection was lost during COMMIT: the change may or may not have happened."""

    code = "outcome_unknown"


class StorageFull(Fault):
    """There is no room left where bytes must be kept."""

    code = "storage_full"
    status = 507


class StorageFailed(Fault):
    """The disk refused to keep or to return bytes."""

    code = "storage_failed"


class UnexpectedConstraint(Fault):
    """The database refused a row for a reason that no message explains yet; this is our bug."""

    code = "unexpected_constraint"
    status = 500


class Unexpected(Fault):
    """Something failed in a way that no message explains; this is our bug, and the log has its cause."""

    code = "unexpected"
    status = 500
