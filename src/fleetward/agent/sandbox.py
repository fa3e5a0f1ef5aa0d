"""What keeps a command apart from its machine: what this machine offers, and what a job gets of it.

Owns the probe, the sandbox's arguments and the plain words for what is in force and what is not. Refuses to
know how a command is started and minded.
"""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from fleetward.agent.attempt import USER_LAST, USER_PLACEHOLDER
from fleetward.domain.errors import SandboxUnavailable

Asked = Literal["auto", "require", "none"]
Network = Literal["on", "none"]

PROBE_SECONDS: Final = 10
PATH_DEFAULT: Final = "/usr/local/bin:/usr/bin:/bin"
STATUS_FD: Final = "3"  # where bubblewrap says whether it could start the command; the supervisor listens there

# Root needs these inside, to enter a folder of the attempt's user and become that user; that drops them all.
_CAPABILITIES: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_OVERRIDE")
_BECOME_USER: Final = (
    f"--reuid={USER_PLACEHOLDER}",
    f"--regid={USER_PLACEHOLDER}",
    "--clear-groups",
    "--inh-caps=-all",
    "--ambient-caps=-all",
    "--bounding-set=-all",
    "--no-new-privs",
    "--",
)
# Empty in each sandbox. /run holds the sockets of the machine's services; of it, name resolution alone is given back.
_ROOT: Final = Path("/")
_PRIVATE: Final = (_ROOT / "tmp", _ROOT / "var/tmp", _ROOT / "dev/shm", _ROOT / "run")
_GIVEN_BACK: Final = ("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager", "/run/current-system")


@dataclass(frozen=True, slots=True)
class Features:
    """What this machine offers to keep a command apart; `why_not` says what is missing."""

    bwrap: str | None
    setpriv: str | None
    is_root: bool
    can_cut_network: bool
    why_not: str

    def document(self) -> dict[str, object]:
        """Give it in the words of the inventory, for `node show` and `doctor`."""
        return {
            "sandbox": "bubblewrap" if self.bwrap else "none",
            "user_per_attempt": self.is_root,
            "network_none": self.can_cut_network,
            "tree": "complete" if sys.platform == "linux" else "best effort",
            "memory_limit": "not enforced",
            "cpu_limit": "not enforced",
            **({"why_not": self.why_not} if self.why_not else {}),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """How one command is kept apart: the sandbox's own command before it, and what is in force, for the receipt."""

    prefix: tuple[str, ...]
    launcher: tuple[str, ...]  # what runs inside before the command, to become the attempt's user
    work: Path
    own_user: bool
    in_force: dict[str, str]

    @property
    def has_pid_namespace(self) -> bool:
        """Whether the end of the sandbox is the end of all in it."""
        return bool(self.prefix)

    def prefix_in(self, working_dir: str) -> tuple[str, ...]:
        """Give everything that comes before the command, when it works in that folder below its own."""
        if not self.prefix:
            return ()
        folder = self.work if working_dir == "." else self.work / working_dir
        return (*self.prefix, "--chdir", str(folder), "--", *self.launcher)


class HasWork(Protocol):
    """An attempt's folder, as far as a sandbox must know it."""

    @property
    def path(self) -> Path:
        """The attempt's own folder."""
        ...

    @property
    def work(self) -> Path:
        """The working folder in it."""
        ...


def probe() -> Features:
    """Try what works here, once; presence of a program proves nothing in a container."""
    is_root = os.geteuid() == 0
    setpriv = shutil.which("setpriv")
    bwrap = shutil.which("bwrap")
    if sys.platform != "linux":
        return Features(None, None, is_root, can_cut_network=False, why_not="this system has no bubblewrap")
    if bwrap is None:
        return Features(None, setpriv, is_root, can_cut_network=False, why_not="bubblewrap (bwrap) is not installed")
    if is_root and setpriv is None:
        why_not = "setpriv, with which root becomes an attempt's user in the sandbox, is not installed"
        return Features(None, None, is_root, can_cut_network=False, why_not=why_not)
    failure = _try(bwrap, setpriv, is_root=is_root, extra=())
    if failure:
        return Features(None, setpriv, is_root, can_cut_network=False, why_not=f"bubblewrap does not work: {failure}")
    cut_failure = _try(bwrap, setpriv, is_root=is_root, extra=("--unshare-net",))
    return Features(bwrap, setpriv, is_root, can_cut_network=not cut_failure, why_not="")


def _try(bwrap: str, setpriv: str | None, *, is_root: bool, extra: Sequence[str]) -> str:
    """Run the shape of sandbox that jobs get around `true`; the failure's last line, or nothing."""
    launcher = _launcher(setpriv, user=str(USER_LAST)) if is_root else ()
    argv = [bwrap, *_namespaces(is_root=is_root), *extra, *_machine(), "--", *launcher, "true"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def plan(
    asked: Asked,
    *,
    network: Network,
    features: Features,
    folder: HasWork,
    hidden: Sequence[Path],
) -> Plan:
    """Decide how a command is kept apart, or refuse what this machine cannot give."""
    is_sandboxed = features.bwrap is not None and asked != "none"
    if asked == "require" and not is_sandboxed:
        raise SandboxUnavailable(
            f"the job requires a sandbox and this node has none: {features.why_not}",
            hint="submit it with `sandbox: auto`, or install bubblewrap on the node",
        )
    if network == "none" and not (is_sandboxed and features.can_cut_network):
        raise SandboxUnavailable(
            "the job asks for `network: none`, and this node cannot cut a command off"
            + (f": {features.why_not}" if features.why_not else ""),
            hint="a sandbox with a network namespace is needed",
        )
    in_force = {
        "sandbox": "bubblewrap" if is_sandboxed else _why_none(asked, features),
        "user": "of its own" if features.is_root else "the agent's",
        "network": "none" if network == "none" else "on",
        "tree": "complete" if sys.platform == "linux" else "best effort",
        "memory": "not enforced",
        "cpu": "not enforced",
        "core_dumps": "off",
        "new_privileges": "forbidden" if sys.platform == "linux" else "allowed",
    }
    if not is_sandboxed:
        if features.is_root:
            _must_be_reachable(folder.work)
        return Plan((), (), folder.work, own_user=features.is_root, in_force=in_force)
    assert features.bwrap is not None
    prefix = (
        features.bwrap,
        *_namespaces(is_root=features.is_root),
        *(("--unshare-net",) if network == "none" else ()),
        "--json-status-fd",
        STATUS_FD,
        *_machine(),
        *_masks([*hidden, folder.path.parent], work=folder.work, is_root=features.is_root),
    )
    launcher = _launcher(features.setpriv, user=USER_PLACEHOLDER) if features.is_root else ()
    return Plan(prefix, launcher, folder.work, own_user=features.is_root, in_force=in_force)


def _why_none(asked: str, features: Features) -> str:
    return "none: the job asked for none" if asked == "none" else f"none: {features.why_not}"


def _namespaces(*, is_root: bool) -> tuple[str, ...]:
    # Its end follows the supervisor's, whose child it is; the agent may come and go.
    common = ("--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    if not is_root:
        return common
    return (*common, "--cap-drop", "ALL", *(word for name in _CAPABILITIES for word in ("--cap-add", name)))


def _machine() -> tuple[str, ...]:
    words = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for path in _PRIVATE:
        if path.is_dir() and not path.is_symlink():
            words += ["--perms", "1777", "--tmpfs", str(path)]
    for folder in _GIVEN_BACK:
        words += ["--ro-bind-try", folder, folder]
    return tuple(words)


def _launcher(setpriv: str | None, *, user: str) -> tuple[str, ...]:
    assert setpriv is not None, "a root agent has no sandbox without it"
    return (setpriv, *(word.replace(USER_PLACEHOLDER, user) for word in _BECOME_USER))


def _masks(hidden: Sequence[Path], *, work: Path, is_root: bool) -> tuple[str, ...]:
    """Lay an empty folder over each hidden one, and the working folder alone back over that."""
    work = work.resolve()
    folders = {path.resolve() for path in hidden if path.is_dir()}
    if is_root:
        # Root's own folders are closed to the attempt's user, who must pass through to its working folder.
        folders |= {path for path in work.parents if not _is_passable(path)}
    folders = {path for path in folders if path not in {_ROOT, work} and work not in path.parents}
    folders = {path for path in folders if not any(private in (path, *path.parents) for private in _PRIVATE)}
    # Of one below another only the upper counts.
    tops = sorted(path for path in folders if not any(other in path.parents for other in folders))
    words: list[str] = []
    for top in tops:
        words += ["--perms", "0755", "--tmpfs", str(top)]
    for parent in reversed(work.parents):
        if any(parent == top or top in parent.parents for top in (*tops, *_PRIVATE)):
            words += ["--perms", "0755", "--dir", str(parent)]
    words += ["--bind", str(work), str(work)]
    for top in tops:
        words += ["--remount-ro", str(top)]
    return tuple(words)


def _is_passable(path: Path) -> bool:
    return bool(path.stat().st_mode & stat.S_IXOTH)


def search_path(agents: str, *, own_user: bool) -> str:
    """Keep of the agent's search path what the command can reach: a closed folder in it would hide what is missing."""

    def is_reachable(folder: Path) -> bool:
        if not os.access(folder, os.R_OK | os.X_OK):
            return False
        return not own_user or all(_is_passable(path) for path in (folder, *folder.resolve().parents))

    kept = [word for word in agents.split(":") if word.startswith("/") and is_reachable(Path(word))]
    return ":".join(dict.fromkeys(kept)) or PATH_DEFAULT


def _must_be_reachable(work: Path) -> None:
    closed = [path for path in work.resolve().parents if not _is_passable(path)]
    if closed:
        raise SandboxUnavailable(
            f"without a sandbox an attempt's user cannot reach its working folder: {closed[-1]} is closed to others",
            hint="move the node's home to a folder that others may pass through, such as /var/lib/fleetward",
        )
