"""Who may do what: the scopes that a key can hold.

Owns resources, actions and how a scope is matched. Refuses to know keys' secrets and the database.
"""

from collections.abc import Collection
from typing import Final

RESOURCES: Final = {
    "node": ("read", "create", "update", "delete"),
    "pairing_code": ("read", "create", "delete"),
    "job": ("read", "create", "update", "delete"),
    "blob": ("read", "create"),
    "template": ("read", "create", "update", "delete"),
    "workspace": ("read", "create", "update", "delete", "connect"),
    "workspace_build": ("read", "create", "update"),
    "workspace_build_orchestration": ("read", "create", "update", "delete"),
    "user": ("read", "create", "update", "delete"),
    "api_key": ("read", "create", "update", "delete"),
    "schedule": ("read", "create", "update", "delete"),
    "webhook": ("read", "create", "update", "delete"),
    "event": ("read",),
    "trail": ("read",),
    "system": ("read", "update"),
}

ALL_SCOPES: Final = tuple(
    f"{resource}:{action}" for resource, actions in RESOURCES.items() for action in ("*", *actions)
)


def allows(held: Collection[str], *, needed: str) -> bool:
    """Whether a key with these scopes reaches what needs that one."""
    resource, _, _ = needed.partition(":")
    return needed in held or f"{resource}:*" in held
