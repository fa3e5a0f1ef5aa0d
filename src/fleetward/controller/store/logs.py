"""Logs in SQL: the bytes that an attempt printed, in pieces.

Owns `job_log_chunks`; measurements, so no events. Refuses to know text: bytes in, bytes out.
"""

from dataclasses import dataclass
from uuid import UUID

from fleetward.controller.store.tx import Statement


@dataclass(frozen=True, slots=True)
class Received:
    """How much of an attempt's log is here."""

    received_bytes: int


RECEIVED = Statement(
    """
    SELECT coalesce(max(start_offset + octet_length(content)), 0)::bigint AS received_bytes
    FROM job_log_chunks
    WHERE assignment_id = %(assignment_id)s::uuid
    """,
    row=Received,
)

APPEND = Statement(
    """
    INSERT INTO job_log_chunks (assignment_id, start_offset, content, at)
    VALUES (%(assignment_id)s::uuid, %(start_offset)s::bigint, %(content)s::bytea, %(now)s::timestamptz)
    """,
    row=type(None),
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a log."""

    start_offset: int
    content: bytes


READ = Statement(
    """
    SELECT start_offset, content FROM job_log_chunks
    WHERE assignment_id = %(assignment_id)s::uuid
      AND start_offset + octet_length(content) > %(offset)s::bigint
    ORDER BY start_offset
    LIMIT %(limit)s::int
    """,
    row=Chunk,
)


@dataclass(frozen=True, slots=True)
class Source:
    """The attempt whose log a reader gets, and whether it is still being written."""

    id: UUID
    is_final: bool


SOURCE = Statement(
    """
    SELECT held.id, held.released_at IS NOT NULL OR coalesce(held.outcome = 'lost', false) AS is_final
    FROM job_assignments AS held
    JOIN jobs ON jobs.id = held.job_id
    WHERE held.job_id = %(job_id)s::uuid
      AND (%(assignment_id)s::uuid IS NULL OR held.id = %(assignment_id)s::uuid)
    ORDER BY held.id = jobs.winning_assignment_id DESC NULLS LAST, held.fence DESC
    LIMIT 1
    """,
    row=Source,
)
