"""The objective: what a job document may say, what it needs, and what follows an attempt's end.

Owns the job's vocabulary, its limits, its shape and its budgets. Refuses to know nodes, artifacts'
bytes, the database and the clock.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, StrEnum
from pathlib import PurePosixPath
from typing import Literal, assert_never

import msgspec
from msgspec import Struct, field

from fleetward.domain.errors import InvalidJob, quoted
from fleetward.domain.ids import JobId

NAME_MAX = 128  # characters; it becomes a folder name on the submitter's machine
COMMAND_PARTS_MAX = 4096
COMMAND_BYTES_MAX = 128 * 1024  # Linux limits one argument to 128 KiB; so do we for all of them
ENV_MAX = 1024
INPUTS_MAX = 64
ARTIFACT_RULES_MAX = 256
LABELS_MAX = 64
LABEL_CHARS_MAX = 128
REPLICAS_MAX = 64
ATTEMPTS_MAX = 100
LOSSES_MAX = 1000
CPUS_MAX = 4096
SECONDS_MAX = 366 * 86_400  # a year and a day; nothing waits longer

BACKOFF_FIRST = timedelta(seconds=1)
BACKOFF_MAX = timedelta(minutes=10)
LOSS_HOLD_MAX = timedelta(seconds=30)  # a third of the shortest lease: a lost job is not made to wait for long


class JobStatus(StrEnum):
    """Where a job stands; the moves between them are in `lifecycle.JOB`."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self in {JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED}


class AssignmentState(StrEnum):
    """Where one attempt stands; the moves between them are in `lifecycle.ASSIGNMENT`."""

    ASSIGNED = "assigned"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobInput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An archive that the node unpacks into the working folder before the command starts."""

    sha256: str
    path: str = "input.tar"


class ArtifactCheck(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A check of one artifact's content; at most one of the two."""

    json_schema: dict[str, object] | None = None
    command: list[str] | None = None


class ArtifactRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An artifact that the job promises: a path or glob below its working folder, and what must hold of it."""

    path: str
    required: bool = True
    min_bytes: int = 0
    max_bytes: int | None = None
    media_type: str | None = None
    sha256: str | None = None
    check: ArtifactCheck | None = None


class DeviceNeed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Countable things on a node that the job must have for itself."""

    kind: str
    count: int = 1
    match: dict[str, str] = field(default_factory=dict[str, str])


class Resources(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one attempt takes from its node."""

    cpus: float = 1.0
    memory_bytes: int = 0
    devices: list[DeviceNeed] = field(default_factory=list[DeviceNeed])


class Hedge(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When to open a further attempt beside a slow one."""

    after_seconds: int | None = None
    after_percentile: int | None = None
    max_extra: int = 1


class Timeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long each stage may take, in seconds."""

    queue_seconds: int = 86_400
    start_seconds: int = 60
    run_seconds: int = 3_600
    upload_seconds: int = 600


class JobSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job document: the same words in job files, in the API and in the `jobs.spec` column."""

    command: list[str]
    name: str = ""
    env: dict[str, str] = field(default_factory=dict[str, str])
    inputs: list[JobInput] = field(default_factory=list[JobInput])
    artifacts: list[ArtifactRule] = field(default_factory=list[ArtifactRule])
    resources: Resources = field(default_factory=Resources)
    labels: dict[str, str] = field(default_factory=dict[str, str])
    replicas: int = 1
    quorum: int = 1
    hedge: Hedge | None = None
    max_attempts: int = 3
    max_losses: int = 20
    timeouts: Timeouts = field(default_factory=Timeouts)
    priority: int = 50
    on_disconnect: Literal["stop", "keep"] = "stop"
    network: Literal["on", "none"] = "on"
    sandbox: Literal["auto", "require", "none"] = "auto"
    working_dir: str = "."
    secret_env: list[str] = field(default_factory=list[str])
    after: list[str] = field(default_factory=list[str])
    array: str | None = None
    not_before: str | None = None


def parse_spec(document: object) -> JobSpec:
    """Turn a decoded job document into a checked spec, or refuse it naming the field."""
    try:
        spec = msgspec.convert(document, JobSpec)
    except msgspec.ValidationError as error:
        raise InvalidJob(f"the job document does not have the right form: {error}") from error
    check_spec(spec)
    return spec


def stored_spec(document: object) -> JobSpec:
    """Read a spec that is stored; one that no service wrote reads as a job without a command, which none runs."""
    try:
        return msgspec.convert(document, JobSpec)
    except msgspec.ValidationError:
        return JobSpec(command=[])


def check_spec(spec: JobSpec) -> None:
    """Refuse a spec whose values cannot work, naming the field, what it holds and what it may hold."""
    _check_command(spec)
    _check_text(spec)
    _check_paths(spec)
    _check_numbers(spec)
    _check_supported(spec)


def _refuse(field_name: str, message: str, *, hint: str = "") -> InvalidJob:
    return InvalidJob(f"{field_name}: {message}", hint=hint, field=field_name)


def _check_command(spec: JobSpec) -> None:
    if not spec.command or not spec.command[0]:
        raise _refuse("command", "a job needs a command", hint='for example ["python", "train.py"]')
    if len(spec.command) > COMMAND_PARTS_MAX:
        raise _refuse("command", f"has {len(spec.command)} parts; at most {COMMAND_PARTS_MAX}")
    if sum(len(part.encode()) for part in spec.command) > COMMAND_BYTES_MAX:
        raise _refuse("command", f"is longer than {COMMAND_BYTES_MAX} bytes", hint="put it in a file and use `inputs`")
    if any("\0" in part for part in spec.command):
        raise _refuse("command", "contains a NUL character, which no program can be given")


def _check_text(spec: JobSpec) -> None:
    if len(spec.name) > NAME_MAX or any(c in spec.name for c in "/\0") or spec.name in {".", ".."}:
        raise _refuse("name", f"{quoted(spec.name)} is no name: at most {NAME_MAX} characters, and no slash")
    if not spec.name.isprintable():
        raise _refuse("name", f"{quoted(spec.name)} contains control characters")
    if len(spec.env) > ENV_MAX:
        raise _refuse("env", f"has {len(spec.env)} variables; at most {ENV_MAX}")
    for key, value in spec.env.items():
        if not key or "=" in key or "\0" in key + value:
            raise _refuse("env", f"{quoted(key)} cannot be an environment variable")
    check_labels(spec.labels)


def check_labels(labels: dict[str, str]) -> None:
    """Refuse labels that are too many, too long or not printable."""
    if len(labels) > LABELS_MAX:
        raise _refuse("labels", f"has {len(labels)} labels; at most {LABELS_MAX}")
    for key, value in labels.items():
        text = key + value
        if not key or len(key) > LABEL_CHARS_MAX or len(value) > LABEL_CHARS_MAX or not text.isprintable():
            raise _refuse("labels", f"{quoted(key)} is no label: printable, at most {LABEL_CHARS_MAX} characters")


def _check_paths(spec: JobSpec) -> None:
    if len(spec.inputs) > INPUTS_MAX:
        raise _refuse("inputs", f"has {len(spec.inputs)} archives; at most {INPUTS_MAX}")
    if len(spec.artifacts) > ARTIFACT_RULES_MAX:
        raise _refuse("artifacts", f"has {len(spec.artifacts)} rules; at most {ARTIFACT_RULES_MAX}")
    for index, rule in enumerate(spec.artifacts):
        check_inside(f"artifacts[{index}].path", rule.path)
    for index, archive in enumerate(spec.inputs):
        check_inside(f"inputs[{index}].path", archive.path)
        _check_sha256(f"inputs[{index}].sha256", archive.sha256)
    for index, rule in enumerate(spec.artifacts):
        if rule.sha256 is not None:
            _check_sha256(f"artifacts[{index}].sha256", rule.sha256)
    if spec.working_dir != ".":
        check_inside("working_dir", spec.working_dir)


def check_inside(field_name: str, path: str) -> None:
    """Refuse a path or glob that could leave the folder it is relative to."""
    parts = PurePosixPath(path).parts
    if not path or not parts or path.startswith("/") or ".." in parts or "\\" in path or not path.isprintable():
        raise _refuse(
            field_name,
            f"{quoted(path)} leaves the working folder or cannot be written",
            hint="give a relative path without `..`",
        )


def _check_sha256(field_name: str, text: str) -> None:
    if len(text) != 64 or any(c not in "0123456789abcdef" for c in text):
        raise _refuse(field_name, f"{quoted(text)} is no SHA-256: 64 lowercase hex digits")


def _check_numbers(spec: JobSpec) -> None:
    def within(field_name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise _refuse(field_name, f"{value:g} is out of range; from {low:g} to {high:g}")

    within("replicas", spec.replicas, 1, REPLICAS_MAX)
    within("quorum", spec.quorum, 1, REPLICAS_MAX)
    within("max_attempts", spec.max_attempts, 1, ATTEMPTS_MAX)
    within("max_losses", spec.max_losses, 0, LOSSES_MAX)
    within("priority", spec.priority, 0, 100)
    within("resources.cpus", spec.resources.cpus, 0.001, CPUS_MAX)
    within("resources.memory_bytes", spec.resources.memory_bytes, 0, 2**50)
    within("timeouts.queue_seconds", spec.timeouts.queue_seconds, 1, SECONDS_MAX)
    within("timeouts.start_seconds", spec.timeouts.start_seconds, 1, SECONDS_MAX)
    within("timeouts.run_seconds", spec.timeouts.run_seconds, 1, SECONDS_MAX)
    within("timeouts.upload_seconds", spec.timeouts.upload_seconds, 1, SECONDS_MAX)
    for index, rule in enumerate(spec.artifacts):
        within(f"artifacts[{index}].min_bytes", rule.min_bytes, 0, 2**50)
        if rule.max_bytes is not None:
            within(f"artifacts[{index}].max_bytes", rule.max_bytes, rule.min_bytes, 2**50)
    if spec.quorum > spec.replicas:
        raise _refuse(
            "quorum",
            f"{spec.quorum} agreeing attempts cannot come from {spec.replicas} replicas",
            hint=f"ask for at least {spec.quorum} replicas",
        )


def _check_supported(spec: JobSpec) -> None:
    """Refuse what this version cannot do yet: accepting a word and ignoring it would be a lie."""
    asked = {
        "hedge": spec.hedge is not None,
        "array": spec.array is not None,
        "after": bool(spec.after),
        "not_before": spec.not_before is not None,
        "secret_env": bool(spec.secret_env),
        "on_disconnect": spec.on_disconnect != "stop",
        "resources.devices": bool(spec.resources.devices),
        "artifacts.check": any(rule.check is not None for rule in spec.artifacts),
    }
    for field_name, is_asked in asked.items():
        if is_asked:
            raise _refuse(field_name, "this version of the controller cannot do that", hint="leave the field out")


def cpus_milli(spec: JobSpec) -> int:
    """The CPUs of one attempt in thousandths, the unit in which free room is counted."""
    return max(1, round(spec.resources.cpus * 1000))


def shape(spec: JobSpec) -> str:
    """Digest what decides where the job fits; jobs of one shape fit the same nodes, so one stands for all."""
    asked = {
        "resources": msgspec.to_builtins(spec.resources),
        "labels": spec.labels,
        "sandbox": spec.sandbox,
        "network": spec.network,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


class Outcome(Enum):
    """How an attempt ended, by who is to blame: the job's own budget, the fleet's, or nobody's."""

    FAILED = "failed"  # the command failed, or ran out of its time
    REJECTED = "rejected"  # the node said succeeded; its artifacts do not hold
    LOST = "lost"  # the lease ran out, or the node was removed or declared dead
    CANCELLED = "cancelled"  # a drain, an operator, or another attempt won


class Next(Enum):
    """What a job does after one of its attempts has ended."""

    RETRY = "retry"
    GIVE_UP = "give_up"


def after_attempt(outcome: Outcome, *, failures: int, losses: int, max_attempts: int, max_losses: int) -> Next:
    """Decide whether another attempt is owed; the counts include the attempt that has just ended."""
    match outcome:
        case Outcome.FAILED | Outcome.REJECTED:
            return Next.RETRY if failures < max_attempts else Next.GIVE_UP
        case Outcome.LOST:
            return Next.RETRY if losses <= max_losses else Next.GIVE_UP
        case Outcome.CANCELLED:
            return Next.RETRY
        case _:
            assert_never(outcome)


def retry_delay(failures: int, *, rng: random.Random) -> timedelta:
    """Full jitter: anywhere up to the exponential bound, so a failed fleet does not return as one."""
    assert failures >= 1
    bound = min(BACKOFF_MAX, BACKOFF_FIRST * (1 << min(failures - 1, 20)))
    return bound * rng.random()


def attempts_wanted(*, replicas: int, verified: int, open_count: int) -> int:
    """How many further attempts a job wants open at once."""
    return max(0, replicas - verified - open_count)


def summary_line(command: Sequence[str]) -> str:
    """Show a command on one line, for lists and logs."""
    return " ".join(command)[:200]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a job stands after some of its attempts ended, counted under the job's lock."""

    id: JobId
    status: JobStatus
    is_cancelling: bool
    replicas: int
    open_count: int
    verified_count: int
    failures: int
    losses: int
    max_attempts: int
    max_losses: int
    last_outcome: Outcome
    last_error: str


@dataclass(frozen=True, slots=True)
class Move:
    """What becomes of the job: its status, until when a further attempt is held back, and why it ended."""

    status: JobStatus
    held_for: timedelta | None = None
    error: str | None = None


def settle(standing: Standing, *, rng: random.Random) -> Move:
    """Decide what becomes of a job when attempts have ended without completing it."""
    assert not standing.status.is_ended, "an ended job is never settled again"
    if standing.open_count > 0:
        return Move(JobStatus.RUNNING, held_for=_hold(standing, rng=rng))
    if standing.is_cancelling:
        return Move(JobStatus.CANCELLED)
    following = after_attempt(
        standing.last_outcome,
        failures=standing.failures,
        losses=standing.losses,
        max_attempts=standing.max_attempts,
        max_losses=standing.max_losses,
    )
    if following is Next.GIVE_UP:
        return Move(JobStatus.FAILED, error=_last_words(standing))
    if attempts_wanted(replicas=standing.replicas, verified=standing.verified_count, open_count=0) == 0:
        return Move(JobStatus.FAILED, error="quorum_disagrees: the verified attempts do not agree on their digests")
    return Move(JobStatus.QUEUED, held_for=_hold(standing, rng=rng))


def _hold(standing: Standing, *, rng: random.Random) -> timedelta | None:
    match standing.last_outcome:
        case Outcome.FAILED | Outcome.REJECTED:
            return retry_delay(standing.failures, rng=rng)
        case Outcome.LOST if standing.losses > 1:
            # The first loss is chance; a node that loses all it gets must not use the budget up in a second.
            return min(LOSS_HOLD_MAX, retry_delay(standing.losses - 1, rng=rng))
        case _:
            return None


def _last_words(standing: Standing) -> str:
    if standing.last_outcome is Outcome.LOST:
        return f"given up after {standing.losses} lost attempts; the last one: {standing.last_error}"
    return f"given up after {standing.failures} failed attempts; the last one: {standing.last_error}"
