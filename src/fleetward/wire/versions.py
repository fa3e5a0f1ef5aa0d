"""Which versions speak to which.

Owns the version of the program and the rule for agents. Refuses to know how a refusal is answered.
"""

from typing import Final

VERSION: Final = "0.1.0"
API_PREFIX: Final = "/api/v1"


def agent_is_supported(agent: str, *, controller: str = VERSION) -> bool:
    """Whether an agent of that version works: the same major, one minor behind or ahead."""
    theirs, ours = _major_minor(agent), _major_minor(controller)
    if theirs is None or ours is None:
        return False
    return theirs[0] == ours[0] and abs(theirs[1] - ours[1]) <= 1


def _major_minor(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 2 or not parts[0].isdecimal() or not parts[1].isdecimal():
        return None
    return int(parts[0]), int(parts[1])
