"""What an attempt hands in: the words for artifacts and verdicts.

Owns the states of an artifact and the verdicts. Refuses to know bytes: `verify` looks at those.
"""

from enum import StrEnum

RECEIPT_PATH = ".fleetward/receipt.json"  # every attempt hands one in, so every job has something to verify
INLINE_BYTES_MAX = 64 * 1024  # a file up to this travels inside the report
INLINE_SYNC_BYTES_MAX = 1024 * 1024  # and all of one sync's together
ARTIFACTS_MAX = 10_000  # files of one attempt


class ArtifactState(StrEnum):
    """How far the controller can vouch for an artifact."""

    DECLARED = "declared"
    STORED = "stored"
    VERIFIED = "verified"
    REJECTED = "rejected"


class Verdict(StrEnum):
    """What verification said; `error` is the verifier's own trouble and blames nobody."""

    VERIFIED = "verified"
    REJECTED = "rejected"
    ERROR = "error"
