"""The process between agent and command: one per attempt, so that an attempt outlives the agent.

Owns the command's pipes, log, deadlines and end, and writes to disk what it saw. Refuses to know the
network, the job and the controller; it imports the standard library only, because it must start fast.
"""

import contextlib
import fcntl
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

from fleetward.agent import attempt, process_tree
from fleetward.agent.attempt_log import CappedLog

TICK_SECONDS: Final = 2.0  # the longest sleep, so that a machine back from suspend sees its deadlines soon
LINGER_SECONDS: Final = 2.0  # what is left behind by the main command may use to end by itself
KILL_AGAIN_SECONDS: Final = 0.1
KILL_AGAIN_MAX_SECONDS: Final = 2.0
NEWS_SECONDS: Final = 0.2  # news of more log come at most this often
READ_BYTES: Final = 1024 * 1024
STATUS_FD: Final = 3  # where the sandbox says whether it could start the command
NPROC_MAX: Final = 4096
OOM_SCORE: Final = "500"  # short of memory, the kernel should take the command and not its supervisor
UID_LOCKS: Final = "/run/fleetward-users"


class StartFailedError(Exception):
    """The command could not be started; the message is for the job's owner."""


class Supervisor:
    """Runs one order from start to gone."""

    def __init__(self, order: attempt.OrderDocument, status: attempt.StatusDocument) -> None:
        self.order = order
        self.status = status
        self._folder_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Opened for reading and writing: it then never reports an end, and lines wait in it for us.
        self._control_fd = os.open(attempt.CONTROL, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_fd = _wake_on_signals()
        self._log = CappedLog(attempt.LOG, limit_bytes=order.log_bytes_max)
        self._output_fd = -1
        self._start_report_fd = -1
        self._user_lock_fd = -1
        self._deadline = order.deadline
        self._stop_reason: str | None = None
        self._kill_at: float | None = None
        self._kill_pause = KILL_AGAIN_SECONDS
        self._news_at: float | None = None
        self._pending_control = b""
        self._status_is_saved = True

    # The order of things

    def run(self) -> None:
        """Start the command, mind it, and leave nothing of it behind."""
        try:
            self._start()
        except StartFailedError as failure:
            self._ended(exit_code=None, ended_by="start_failed", message=str(failure))
        while self.status.phase != "ended" or not self._reap():
            self._wait()
            self._hear()
            self._reap()
            self._mind_time()
        self._gone()

    def give_up(self, message: str) -> None:
        """After an error of our own: end everything and say so; a tree without supervisor helps nobody."""
        self.status.warnings.append(message)
        if self.status.phase != "ended":
            self._ended(exit_code=None, ended_by="lost", message="the supervisor failed; see its log on the node")
        self._kill_at = 0.0
        while not self._reap():
            self._mind_time()
            self._wait()
        self._gone()

    def save(self) -> None:
        """Bring the status to disk; on a full disk try again later, with the room that was kept for it."""
        self.status.log_bytes = self._log.kept_bytes
        self.status.log_written_bytes = self._log.written_bytes
        text = attempt.dump(self.status)
        try:
            try:
                attempt.write_atomically(attempt.STATUS, text, folder_fd=self._folder_fd)
            except OSError:
                with contextlib.suppress(OSError):
                    Path(attempt.RESERVE).unlink()
                attempt.write_atomically(attempt.STATUS, text, folder_fd=self._folder_fd)
                if self.status.phase != "gone":
                    keep_reserve()  # else the last lines of the log would take the last status's room
        except OSError:
            self._status_is_saved = False
            return
        self._status_is_saved = True
        self._tell()

    # Starting

    def _start(self) -> None:
        user = self._claim_user() if self.order.own_user else None
        self.status.user = user
        self.save()
        output_fd, output_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(output_end, True)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(output_fd, fcntl.F_SETPIPE_SZ, READ_BYTES)
        failure_fd, failure_end = os.pipe2(os.O_CLOEXEC)
        report_fd, report_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(report_fd, False)
        supervisor_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            become_command(
                self.order,
                user=user,
                supervisor_pid=supervisor_pid,
                output_fd=output_end,
                failure_fd=failure_end,
                report_fd=report_end,
            )
        for fd in (output_end, failure_end, report_end):
            os.close(fd)
        self._output_fd, self._start_report_fd = output_fd, report_fd
        ticks = process_tree.start_ticks(pid)
        failure = _read_all(failure_fd)
        os.close(failure_fd)
        if failure:
            os.waitpid(pid, 0)
            raise StartFailedError(failure.decode(errors="replace"))
        self.status.pid, self.status.pid_ticks = pid, ticks
        self.status.phase = "running"
        self.status.started_at, self.status.started_boottime = attempt.wall_time(), attempt.boottime()
        self.save()

    def _claim_user(self) -> int:
        """Find a user that nothing runs as. The lock lives as long as this process does."""
        try:
            Path(UID_LOCKS).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StartFailedError(f"no user of its own for the attempt: {UID_LOCKS}: {error.strerror}") from error
        count = attempt.USER_LAST - attempt.USER_FIRST + 1
        first = int.from_bytes(os.urandom(4)) % count
        for step in range(count):
            user = attempt.USER_FIRST + (first + step) % count
            fd = os.open(f"{UID_LOCKS}/{user}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                continue
            if process_tree.user_has_processes(user):
                os.close(fd)
                continue
            self._user_lock_fd = fd
            give_folder(attempt.WORK, user=user)
            return user
        raise StartFailedError(f"all {count} users for attempts are in use on this node; wait for one to end")

    # Waiting and hearing

    def _wait(self) -> None:
        now = attempt.boottime()
        instants = [self._kill_at, self._news_at, self._run_end(), self._lease_end()]
        timeout = min([TICK_SECONDS, *(max(0.0, at - now) for at in instants if at is not None)])
        poll = select.poll()
        poll.register(self._control_fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        if self._output_fd >= 0:
            poll.register(self._output_fd, select.POLLIN)
        poll.poll(timeout * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._wake_fd, 4096)
            if signal.SIGTERM in numbers:
                self._stop("stopped", grace_seconds=self.order.grace_seconds)

    def _hear(self) -> None:
        self._take_output()
        with contextlib.suppress(BlockingIOError):
            self._pending_control += os.read(self._control_fd, 4096)
        *lines, self._pending_control = self._pending_control.split(b"\n")
        for line in lines:
            self._obey(line.decode(errors="replace").split())
        if not self._status_is_saved:
            self.save()

    def _obey(self, words: list[str]) -> None:
        match words:
            case ["renew", "none"]:
                self._deadline = None
            case ["renew", deadline]:
                # A renewal only lengthens: an older one may come late.
                self._deadline = max(self._deadline or 0.0, float(deadline))
            case ["stop", grace]:
                self._stop("stopped", grace_seconds=float(grace))
            case _:
                self.status.warnings.append("an unknown word came to the supervisor")

    def _take_output(self) -> bool:
        """Move what the command wrote into the log; say whether there was anything."""
        if self._output_fd < 0:
            return False
        try:
            chunk = os.read(self._output_fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            os.close(self._output_fd)
            self._output_fd = -1
            return False
        self._log.write(chunk)
        if self._news_at is None:
            self._news_at = attempt.boottime() + NEWS_SECONDS
        return True

    def _tell(self) -> None:
        """Leave a hint for the agent, if one listens; what is true stands in the status."""
        self._news_at = None
        with contextlib.suppress(OSError):
            fd = os.open(f"../{attempt.CHANGES}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, self.order.assignment_id.encode() + b"\n")
            finally:
                os.close(fd)

    # Time and ending

    def _run_end(self) -> float | None:
        if self.status.phase != "running" or self._stop_reason or self.order.run_seconds is None:
            return None
        assert self.status.started_boottime is not None
        return self.status.started_boottime + self.order.run_seconds

    def _lease_end(self) -> float | None:
        if self.status.phase != "running" or self._deadline is None:
            return None
        return self._deadline - self.order.margin_seconds

    def _mind_time(self) -> None:
        now = attempt.boottime()
        if self._news_at is not None and now >= self._news_at:
            self._tell()
        if (end := self._run_end()) is not None and now >= end:
            self._stop("timeout", grace_seconds=self.order.grace_seconds)
        if (end := self._lease_end()) is not None and now >= end:
            self._deadline = None
            self._stop("deadline", grace_seconds=self.order.margin_seconds * 2 / 3)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()
            self._kill_at = now + self._kill_pause
            self._kill_pause = min(KILL_AGAIN_MAX_SECONDS, self._kill_pause * 1.5)

    def _stop(self, reason: str, *, grace_seconds: float) -> None:
        """Ask the tree to end, and settle when it is made to. A later word can only shorten the grace."""
        if self._reap() or self.status.phase not in {"starting", "running"}:
            return
        kill_at = attempt.boottime() + max(0.0, grace_seconds)
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        if self._stop_reason is None:
            self._stop_reason = reason
            self._terminate()

    def _terminate(self) -> None:
        for pid, ticks in process_tree.descendants(os.getpid()):
            # The sandbox's own two processes know no grace: their end is the end of all in it.
            if self.order.has_pid_namespace and (pid == self.status.pid or process_tree.is_namespace_init(pid)):
                continue
            process_tree.send(pid, ticks, signal.SIGTERM)
            process_tree.send(pid, ticks, signal.SIGCONT)

    def _kill(self) -> None:
        if self.status.user is not None:
            process_tree.kill_user(self.status.user)
        for pid, ticks in process_tree.descendants(os.getpid()):
            process_tree.send(pid, ticks, signal.SIGKILL)

    def _reap(self) -> bool:
        """Collect what has ended; true when no process of the tree is left: the kernel itself says so."""
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.status.pid and self.status.phase == "running":
                self._main_ended(os.waitstatus_to_exitcode(wait_status))

    def _main_ended(self, code: int) -> None:
        exit_code = code if code >= 0 else 128 - code
        if self._stop_reason is not None:
            message = {
                "stopped": "stopped as asked",
                "timeout": f"ran out of its time of {self.order.run_seconds or 0:g} s",
                "deadline": "stopped because the lease could not be renewed in time",
            }[self._stop_reason]
            self._ended(exit_code=exit_code, ended_by=self._stop_reason, message=message)
        elif (failure := self._start_failure(code)) is not None:
            self._ended(exit_code=None, ended_by="start_failed", message=failure)
        else:
            message = f"exit code {exit_code}" if code >= 0 else f"ended by {_signal_name(-code)}"
            self._ended(exit_code=exit_code, ended_by="exited", message=message)

    def _start_failure(self, code: int) -> str | None:
        """Tell the sandbox's own failure from the command's: it says `exit-code` only of a command it started."""
        if not self.order.prefix or code < 0:
            return None
        report = _read_all(self._start_report_fd).decode(errors="replace")
        while self._take_output():
            pass
        said = _last_line(attempt.LOG) if self._log.written_bytes < READ_BYTES else ""
        command = self.order.command[0]
        if "exit-code" not in report:
            reason = said.removeprefix("bwrap: ").removeprefix(f"execvp {command}: ")
            return _start_message(command, reason or "the sandbox could not be made")
        if code in {126, 127} and said.startswith("setpriv: failed to execute "):
            return _start_message(command, said.removeprefix(f"setpriv: failed to execute {command}: "))
        return None

    def _ended(self, *, exit_code: int | None, ended_by: str, message: str) -> None:
        self.status.phase = "ended"
        self.status.exit_code, self.status.ended_by, self.status.message = exit_code, ended_by, message
        self.status.finished_at, self.status.finished_boottime = attempt.wall_time(), attempt.boottime()
        left = process_tree.descendants(os.getpid())
        self.status.lingering = 0 if self.order.has_pid_namespace or self._stop_reason else len(left)
        if left:
            self._terminate()
            linger_end = attempt.boottime() + LINGER_SECONDS
            self._kill_at = linger_end if self._kill_at is None else min(self._kill_at, linger_end)
        self.save()

    def _gone(self) -> None:
        while self._take_output():
            pass
        self._log.finish()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.status.cpu_seconds = round(used.ru_utime + used.ru_stime, 3)
        self.status.memory_peak_bytes = used.ru_maxrss * (1024 if process_tree.IS_LINUX else 1)
        if self._log.trouble:
            self.status.warnings.append(self._log.trouble)
        self.status.phase = "gone"
        self.save()
        # A folder that was removed under us has nobody left to tell.
        while not self._status_is_saved and os.fstat(self._folder_fd).st_nlink > 0:
            # Only for room on the disk: the lease's instants lie behind by now, and waiting for them would spin.
            select.poll().poll(TICK_SECONDS * 1000)
            self.save()


# The child's side, between fork and exec


def become_command(
    order: attempt.OrderDocument,
    *,
    user: int | None,
    supervisor_pid: int,
    output_fd: int,
    failure_fd: int,
    report_fd: int,
) -> NoReturn:
    """Turn this freshly forked process into the command, or say why not and end."""
    argv = [word.replace(attempt.USER_PLACEHOLDER, str(user)) for word in order.prefix] + list(order.command)
    try:
        _enter(order, user=user, supervisor_pid=supervisor_pid)
        null = os.open(os.devnull, os.O_RDONLY)
        # Copies at high numbers first: a pipe that already is 1, 2 or 3 would be overwritten before it is used.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (null, output_fd, report_fd, failure_fd)]
        failure_fd = ends[3]
        os.dup2(ends[0], 0)
        os.dup2(ends[1], 1)
        os.dup2(ends[1], 2)
        os.dup2(ends[2], STATUS_FD, inheritable=bool(order.prefix))
        os.execvpe(argv[0], argv, order.env)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        os.write(failure_fd, _start_message(order.command[0], reason).encode(errors="replace")[:2048])
    finally:
        os._exit(127)


def _enter(order: attempt.OrderDocument, *, user: int | None, supervisor_pid: int) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, encoding="ascii")
    if user is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (NPROC_MAX, NPROC_MAX))
    # The sandbox itself enters the folder, changes the user and forbids new privileges: it may need some.
    if not order.prefix:
        _enter_folder(order.working_dir)
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        process_tree.forbid_new_privileges()
    process_tree.die_with_parent()
    if os.getppid() != supervisor_pid:
        os._exit(127)


def _enter_folder(working_dir: str) -> None:
    """Go down one part at a time: an input may have put a link where the job names a folder."""
    os.chdir(attempt.WORK)
    for part in working_dir.split("/"):
        if part not in {"", "."}:
            fd = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            os.fchdir(fd)
            os.close(fd)


def give_folder(path: str, *, user: int) -> None:
    """Make a folder and all in it a user's; links themselves change hands, never what they point to."""
    for _, folders, files, fd in os.fwalk(path, follow_symlinks=False):
        os.fchown(fd, user, user)
        for name in folders + files:
            os.chown(name, user, user, dir_fd=fd, follow_symlinks=False)


def _start_message(command: str, reason: str) -> str:
    return f"the command {command!r} could not be started: {reason}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_all(fd: int) -> bytes:
    """Read to the end, or, where the descriptor does not block, what is there."""
    content = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, 65536):
            content += chunk
    return content


def _last_line(path: str) -> str:
    lines = Path(path).read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _wake_on_signals() -> int:
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return read_end


# Starting and clearing up


def sweep(status: attempt.StatusDocument, order: attempt.OrderDocument) -> None:
    """End what a killed supervisor left behind: by user where it had one, else by the mark in its environment."""
    mark = f"{attempt.MARK}={order.assignment_id}"
    poll = select.poll()
    while True:
        left = process_tree.marked(mark)
        if status.user is not None:
            process_tree.kill_user(status.user)
            left += process_tree.owned_by(status.user)
        if not left:
            return
        for pid, ticks in left:
            process_tree.send(pid, ticks, signal.SIGKILL)
        poll.poll(KILL_AGAIN_SECONDS * 1000)


def resume() -> attempt.StatusDocument | None:
    """Read what an earlier supervisor of this attempt left, if there was one."""
    try:
        return attempt.load_status(Path(attempt.STATUS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def supervise() -> None:
    """Carry out the order in this folder; never a second time."""
    order = attempt.load_order(Path(attempt.ORDER).read_text(encoding="utf-8"))
    boot_id = attempt.boot_id()
    earlier = resume()
    if earlier is not None and earlier.phase == "gone":
        return
    process_tree.become_subreaper()
    status = attempt.StatusDocument(boot_id=boot_id, supervisor_pid=os.getpid())
    supervisor = Supervisor(order, earlier or status)
    if earlier is not None or order.boot_id != boot_id:
        if earlier is not None and earlier.boot_id == boot_id:
            sweep(earlier, order)
        supervisor.give_up("the supervisor of this attempt was killed")
        return
    try:
        supervisor.run()
    except Exception as error:
        supervisor.give_up(f"the supervisor failed: {error}")
        raise


def main(folder: str) -> int:
    """Detach from whoever started this, answer once the attempt is in our hands, then supervise."""
    os.chdir(folder)
    os.umask(0o077)
    ready_fd, ready_end = os.pipe2(os.O_CLOEXEC)
    if os.fork() > 0:
        os.close(ready_end)
        # An empty answer is an end without one: then the reason is on stderr.
        return 0 if os.read(ready_fd, 16) else 1
    os.close(ready_fd)
    os.setsid()
    lock_fd = os.open(attempt.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(ready_end, b"held")
        return 0
    with contextlib.suppress(FileExistsError):
        os.mkfifo(attempt.CONTROL, 0o600)
    keep_reserve()
    # Open before we answer, so that what the agent says from then on waits here instead of being refused.
    os.open(attempt.CONTROL, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    log_fd = os.open(attempt.SUPERVISOR_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log_fd, 2)
    os.write(ready_end, b"ready")
    os.close(ready_end)
    supervise()
    return 0


def keep_reserve() -> None:
    """Take a little room now, to be given up when the last status finds the disk full."""
    with contextlib.suppress(OSError), Path(attempt.RESERVE).open("xb") as file:
        file.write(b"\0" * attempt.RESERVE_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
