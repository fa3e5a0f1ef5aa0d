"""Bugs that a simulator worth its time must find: planted at run time, and only when asked.

Owns the list. Each changes the text of some statements or functions of the real program while a world runs.
Refuses to touch anything that outlives the block.
"""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Final, LiteralString

from fleetward.agent import session
from fleetward.controller.services import artifacts as uploading
from fleetward.controller.services import pairing, sync, verifying
from fleetward.controller.store import assignments, jobs, nodes, queue
from fleetward.controller.store.tx import Statement

SEEDS_MAX: Final = 200

Plant = Callable[[ExitStack], None]
Change = tuple[LiteralString, LiteralString]


@contextmanager
def planted(name: str | None) -> Generator[None]:
    """Live with a bug for a while, or with none."""
    with ExitStack() as undo:
        if name is not None:
            BUGS[name](undo)
        yield


def _replace(undo: ExitStack, owner: ModuleType | type, name: str, value: object) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _edit(undo: ExitStack, module: ModuleType, name: str, *changes: Change) -> None:
    """Change the text of a statement; a change that finds nothing to change is a bug of this list."""
    statement: Statement[object] = getattr(module, name)
    sql = statement.sql
    for old, new in changes:
        assert old in sql, f"{name} has no {old!r} any more"
        sql = sql.replace(old, new)
    _replace(undo, module, name, dataclasses.replace(statement, sql=sql))


def _rewrite(undo: ExitStack, owner: ModuleType | type, name: str, *changes: Change) -> None:
    """Change the text of a function, in the same way."""
    function: FunctionType = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert old in source, f"{name} has no {old!r} any more"
        source = source.replace(old, new)
    compiled = compile(source, f"<{name}, with a bug>", "exec")
    code = next(part for part in compiled.co_consts if isinstance(part, CodeType) and part.co_name == name)
    changed = FunctionType(code, function.__globals__, name, function.__defaults__)
    changed.__kwdefaults__ = function.__kwdefaults__
    _replace(undo, owner, name, changed)


def _no_fence_guard(undo: ExitStack) -> None:
    """Whatever fence a report carries is taken for the right one."""
    _rewrite(undo, sync, "_read_report", ("row is None or row.fence != held.fence", "row is None"))
    _edit(undo, assignments, "REPORT", ("AND held.fence = report.fence", ""))
    _edit(undo, assignments, "RELEASE", ("AND held.fence = hold.fence", ""))


def _no_session_guard(undo: ExitStack) -> None:
    """A call of a session that has ended is as good as any."""
    _rewrite(undo, sync, "_refusal", ("node.session != credential.session or ", ""))
    _edit(undo, nodes, "BEAT", ("node.session = beat.session", "true"))
    _edit(undo, assignments, "REPORT", ("AND node.session = report.session", ""))
    for name in ("RENEW", "RELEASE"):
        _edit(undo, assignments, name, ("AND node.session = hold.session", ""))


def _no_sequence_guard(undo: ExitStack) -> None:
    """A call that was overtaken on its way is believed."""
    _rewrite(undo, sync, "_refusal", ("newest <= (node.sequence or 0)", "newest <= 0"))
    _edit(undo, nodes, "BEAT", ("kept.sequence < excluded.sequence", "true"))


def _verified_before_stored(undo: ExitStack) -> None:
    """The row says stored before the bytes are on disk, and the verifier believes the row."""
    finish: LiteralString = "blobs.finish(row.id, digest=Digest.parse(row.sha256), size_bytes=row.size_bytes)"
    end: LiteralString = "return UploadState(path=row.path, received_bytes=received, stored=True)"
    _rewrite(
        undo,
        uploading,
        "upload",
        (finish, "Location(Digest.parse(row.sha256), row.size_bytes)"),
        (end, f"{finish}\n    {end}"),
    )
    _rewrite(
        undo,
        verifying,
        "_measure",
        ("return blobs.rehash(location)", "return Measured(location.digest, location.size_bytes, b'')"),
    )


def _completed_on_its_word(undo: ExitStack) -> None:
    """The job is complete when the node says so."""
    complete: LiteralString = """
        UPDATE jobs SET
            status = 'completed', runnable_at = NULL, held_until = NULL, finished_at = %(now)s::timestamptz
        FROM moved
        WHERE jobs.id = moved.job_id AND moved.state = 'succeeded'
    """
    _edit(undo, assignments, "REPORT", ("), told AS (", f"), completed AS ({complete}), told AS ("))


def _verified_unseen(undo: ExitStack) -> None:
    """The verifier does not look."""
    _rewrite(undo, verifying, "_look", ("judgement.verdict, ", "Verdict.VERIFIED, "))


def _expired_unseen(undo: ExitStack) -> None:
    """A lease that was renewed since it was found overdue is ended all the same."""
    _edit(
        undo,
        assignments,
        "EXPIRE",
        ("AND held.lease_expires_at = overdue.lease_expires_at", ""),
        (
            "AND held.lease_expires_at < %(now)s::timestamptz - %(grace)s::interval",
            "AND %(grace)s::interval IS NOT NULL",
        ),
    )


def _room_not_counted(undo: ExitStack) -> None:
    """The plan is applied without counting the nodes' room again."""
    room: LiteralString = "AND planned.cpus_running <= node.cpus_milli - busy.cpus_milli - resident.cpus_milli"
    _edit(undo, queue, "ASSIGN", (room, ""))


def _copies_not_counted(undo: ExitStack) -> None:
    """The plan is applied without counting the job's attempts again."""
    _edit(undo, queue, "ASSIGN", ("AND planned.copy <= jobs.replicas - tally.counted", ""))


def _renewal_shortens(undo: ExitStack) -> None:
    """A renewal sets the lease instead of lengthening it."""
    greatest: LiteralString = "greatest(renewed.lease_expires_at, %(now)s::timestamptz + %(lease)s::interval)"
    _edit(undo, assignments, "RENEW", (greatest, "%(now)s::timestamptz + %(lease)s::interval / 2"))


def _renewal_forgotten(undo: ExitStack) -> None:
    """The node is told that its lease was renewed, and it was not."""
    _edit(undo, assignments, "RENEW", ("%(now)s::timestamptz + %(lease)s::interval", "renewed.lease_expires_at"))


def _lease_from_the_reply(undo: ExitStack) -> None:
    """The node counts its lease from when the reply came, not from when it asked."""
    asked: LiteralString = "asked_at = self._asked_at.get(reply.sequence)"
    _rewrite(undo, session.Session, "_obey", (asked, f"{asked} and now"))


def _losers_freed_at_once(undo: ExitStack) -> None:
    """What lost is released before its node has stopped it."""
    at: LiteralString = "finished_at = greatest(%(now)s::timestamptz, moving.assigned_at),"
    told: LiteralString = "moving.finished_at, moving.error"
    _edit(
        undo,
        assignments,
        "CANCEL_OPEN",
        (at, at + " released_at = greatest(%(now)s::timestamptz, moving.assigned_at),"),
        (told, told + ", moving.released_at"),
    )


def _event_says_less(undo: ExitStack) -> None:
    """A change is not told whole."""
    _edit(undo, jobs, "MOVE", ("to_jsonb(moved) - 'id'", "to_jsonb(moved) - 'id' - 'runnable_at'"))


def _nonce_forgotten(undo: ExitStack) -> None:
    """A session that was opened, and whose answer was lost, is not given again."""
    _edit(undo, nodes, "OPEN_SESSION", ("session_nonce = %(nonce)s::text", "session_nonce = %(nonce)s::text || '!'"))


def _code_used_twice(undo: ExitStack) -> None:
    """A used code makes another node."""
    _rewrite(undo, pairing, "_use_code", ("if code.used_at is not None:", "if False:"))
    _edit(undo, nodes, "GIVE_KEY", ("AND node_pairing_codes.used_at IS NULL", ""))


def _back_off_without_end(undo: ExitStack) -> None:
    """A job that waits after a failure is not looked at again."""
    _edit(
        undo,
        jobs,
        "RIPEN",
        ("WHERE held_until <= %(now)s::timestamptz", "WHERE held_until IS NULL AND %(now)s IS NULL"),
    )


def _gone_too_early(undo: ExitStack) -> None:
    """The node says that an attempt is gone as soon as it was told to stop it."""
    _rewrite(undo, session, "_held", ("released=is_final", "released=is_final or attempt.known == 'stop'"))


BUGS: Final[Mapping[str, Plant]] = {
    "no-fence-guard": _no_fence_guard,
    "no-session-guard": _no_session_guard,
    "no-sequence-guard": _no_sequence_guard,
    "verified-before-stored": _verified_before_stored,
    "completed-on-its-word": _completed_on_its_word,
    "verified-unseen": _verified_unseen,
    "expired-unseen": _expired_unseen,
    "room-not-counted": _room_not_counted,
    "copies-not-counted": _copies_not_counted,
    "renewal-shortens": _renewal_shortens,
    "renewal-forgotten": _renewal_forgotten,
    "lease-from-the-reply": _lease_from_the_reply,
    "losers-freed-at-once": _losers_freed_at_once,
    "gone-too-early": _gone_too_early,
    "event-says-less": _event_says_less,
    "nonce-forgotten": _nonce_forgotten,
    "code-used-twice": _code_used_twice,
    "back-off-without-end": _back_off_without_end,
}
