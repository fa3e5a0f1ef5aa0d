"""Controllers in SQL: which run, and what a first one owes the fleet after silence.

Owns the `controllers` table. Refuses to know why a controller stopped.
"""

from dataclasses import dataclass

from fleetward.controller.store.tx import Statement


@dataclass(frozen=True, slots=True)
class Present:
    """How many controllers have been here within a beat."""

    count: int


PRESENT = Statement(
    """
    SELECT count(*)::int AS count FROM controllers
    WHERE seen_at > %(now)s::timestamptz - %(beat)s::interval
    """,
    row=Present,
)

# One statement, committed at once: a controller that dies right after has still given the fleet its time.
GRACE = Statement(
    """
    WITH held AS MATERIALIZED (
        SELECT id FROM job_assignments
        WHERE state IN ('assigned', 'running')
          AND lease_expires_at < %(now)s::timestamptz + %(grace)s::interval
        ORDER BY id
        FOR NO KEY UPDATE
    )
    UPDATE job_assignments AS graced SET lease_expires_at = %(now)s::timestamptz + %(grace)s::interval
    FROM held
    WHERE graced.id = held.id
    """,
    row=type(None),
)

SEEN = Statement(
    """
    INSERT INTO controllers (id, started_at, seen_at)
    VALUES (%(id)s::uuid, %(now)s::timestamptz, %(now)s::timestamptz)
    ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at
    """,
    row=type(None),
)

GONE = Statement(
    """
    DELETE FROM controllers
    WHERE id = %(id)s::uuid
       OR seen_at < %(now)s::timestamptz - interval '1 day'
    """,
    row=type(None),
)


@dataclass(frozen=True, slots=True)
class Server:
    """Which PostgreSQL answers."""

    version: str


SERVER = Statement(
    """
    SELECT 'PostgreSQL ' || current_setting('server_version') AS version
    """,
    row=Server,
)
