"""Places to work: the words for workspaces, builds and follow-ups.

Owns the transitions, reasons and orchestration statuses. Refuses to know templates' content, jobs and
the database.
"""

from enum import StrEnum


class Transition(StrEnum):
    """What a build does to its workspace."""

    START = "start"
    STOP = "stop"
    DELETE = "delete"


class BuildReason(StrEnum):
    """Who or what asked for a build."""

    INITIATOR = "initiator"
    AUTOSTART = "autostart"
    AUTOSTOP = "autostop"
    DORMANCY = "dormancy"
    AUTODELETE = "autodelete"
    DASHBOARD = "dashboard"
    CLI = "cli"
    SSH_CONNECTION = "ssh_connection"
    VSCODE_CONNECTION = "vscode_connection"
    JETBRAINS_CONNECTION = "jetbrains_connection"


class OrchestrationStatus(StrEnum):
    """Where a follow-up stands; the moves between them are in `lifecycle.ORCHESTRATION`."""

    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
