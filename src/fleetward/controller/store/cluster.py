"""The one row that is true of the whole database, in SQL.

Owns the `cluster` table's statements. Refuses to know keys.
"""

from dataclasses import dataclass

from fleetward.controller.store.tx import Statement


@dataclass(frozen=True, slots=True)
class KeyringName:
    """The fingerprint of the keyring that the database was made with."""

    keyring_fingerprint: str


CLAIM_KEYRING = Statement(
    """
    UPDATE cluster SET keyring_fingerprint = %(fingerprint)s::text
    WHERE keyring_fingerprint IS NULL
    """,
    row=type(None),
)

KEYRING = Statement(
    """
    SELECT keyring_fingerprint FROM cluster
    WHERE keyring_fingerprint IS NOT NULL
    """,
    row=KeyringName,
)
