"""Fleetward: hand work to machines you own, and get proof that it was done.

Owns what `from fleetward import …` offers. Refuses to load any of it before it is asked for.
"""

import importlib
from typing import TYPE_CHECKING

from fleetward.wire import versions

if TYPE_CHECKING:
    from fleetward.client import Client

__all__ = ["Client", "__version__"]

__version__ = versions.VERSION


def __getattr__(name: str) -> object:
    if name == "Client":
        return importlib.import_module("fleetward.client").Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
