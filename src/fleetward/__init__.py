"""Fleetward: hand work to machines you own, and get proof that it was done.

Owns what `from fleetward import …` offers. Refuses to load any of it before it is asked for.
"""

from typing import TYPE_CHECKING

from fleetward.wire.versions import VERSION as __version__

if TYPE_CHECKING:
    from fleetward.client import Client

__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Client":
        from fleetward.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
