"""What a machine may lack, said by name.

Owns the one way in which a test may stay undone: `needs("bwrap", "…why it cannot be had here")`. The end
of the run lists it as `not run here: <name>: <reason>`, and the exit status stays as it was. Where
FLEETWARD_TEST_REQUIRE names the thing, its lack is a failure. Refuses to know what can be lacking.
"""

import os
from typing import NoReturn

REQUIRE = "FLEETWARD_TEST_REQUIRE"


class NotRunHere(Exception):
    """This machine lacks something that the test cannot do without."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"not run here: {name}: {reason}")
        self.name = name


def required() -> frozenset[str]:
    """The names that whoever runs the tests says are here."""
    return frozenset(name.strip() for name in os.environ.get(REQUIRE, "").split(",") if name.strip())


def needs(name: str, reason: str) -> NoReturn:
    """End the test or fixture that calls it: the machine has no `name`, as `reason` explains."""
    if name in required():
        raise AssertionError(f"{REQUIRE} says that {name} is here, but: {reason}")
    raise NotRunHere(name, reason)
