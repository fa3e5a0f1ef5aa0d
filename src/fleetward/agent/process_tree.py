"""The processes of an attempt: finding every descendant, and ending them until none is left.

Owns what the kernel offers for that: the subreaper, /proc, pidfds. Refuses to know jobs and deadlines. Never
signals a bare process id that could have come to mean another process.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
IS_LINUX: Final = sys.platform == "linux"


def _prctl(option: int, value: int) -> bool:
    if not IS_LINUX:
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0


def become_subreaper() -> bool:
    """Make orphans below this process come back to it, so that no double fork escapes."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let the kernel end this process when its parent dies. Cleared by a change of user: call it after that."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def forbid_new_privileges() -> bool:
    """Make set-user-id programs powerless below here: a child that became root could not be ended."""
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may itself contain spaces and parentheses.
    return text[text.rindex(")") + 2 :].split()


def start_ticks(pid: int) -> int | None:
    """When a process started; with its id this names it for as long as the machine runs."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[19])


def _all_pids() -> list[int]:
    try:
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    except OSError:
        return []


def descendants(root: int) -> list[tuple[int, int]]:
    """List (process id, start ticks) of everything below a process, parents first. The dead are left out."""
    children: dict[int, list[tuple[int, int]]] = {}
    for pid in _all_pids():
        fields = _stat_fields(pid)
        if fields is not None and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append((pid, int(fields[19])))
    found: list[tuple[int, int]] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [pid for pid, _ in below]
    return found


def _status_words(pid: int, name: str) -> list[str]:
    """Read one line of a process's status; nothing when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    return [word for line in lines if line.startswith(name + ":") for word in line.split()[1:]]


def is_namespace_init(pid: int) -> bool:
    """Whether the process is the first of a pid namespace of its own: its end ends all in it."""
    numbers = _status_words(pid, "NSpid")
    return len(numbers) > 1 and numbers[-1] == "1"


def send(pid: int, ticks: int, number: int) -> None:
    """Signal exactly the process that was meant, or nobody."""
    with contextlib.suppress(OSError):
        if not IS_LINUX:
            os.kill(pid, number)
            return
        fd = os.pidfd_open(pid)
        try:
            if start_ticks(pid) == ticks:
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


def kill_user(user: int) -> None:
    """End all processes of a user that has no other use; one call, so that no fork can outrun it."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def user_has_processes(user: int) -> bool:
    """Whether any living process runs as that user."""
    return any(_owner(pid) == user for pid in _all_pids())


def _owner(pid: int) -> int | None:
    fields = _stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    # Not the owner of /proc/PID: that is root's for a process that changed user and is not to be dumped.
    users = _status_words(pid, "Uid")
    return int(users[0]) if users else None


def marked(mark: str) -> list[tuple[int, int]]:
    """List living processes whose environment began with a mark such as `NAME=value`, and all below them."""
    wanted = mark.encode()
    found: dict[int, int] = {}
    for pid in _all_pids():
        fields = _stat_fields(pid)
        if pid == os.getpid() or fields is None or fields[0] in "ZX":
            continue
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found[pid] = int(fields[19])
    for pid in list(found):
        found.update(descendants(pid))
    return list(found.items())


def owned_by(user: int) -> list[tuple[int, int]]:
    """List living processes of a user."""
    mine = [(pid, start_ticks(pid)) for pid in _all_pids() if _owner(pid) == user]
    return [(pid, ticks) for pid, ticks in mine if ticks is not None]
