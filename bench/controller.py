"""A controller of the bench's own: a throw-away home, a real process, gone afterwards.

Owns its start and end, and how much CPU it and its PostgreSQL have used. Refuses to know what is measured.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from fleetward.controller.embedded import remove_cluster
from fleetward.controller.home import ANNOUNCEMENT, OWNERS_KEY, Announcement

READY_SECONDS_MAX: Final = 60.0  # a first start takes about two
STOP_SECONDS_MAX: Final = 20.0
LOOK_SECONDS: Final = 0.05
COMMAND: Final = (sys.executable, "-m", "fleetward.controller")
LOG_SHOWN_BYTES: Final = 4000


class BenchError(Exception):
    """What kept the bench from measuring."""


@dataclass(frozen=True, slots=True)
class Controller:
    """A running controller, its owner's key and its process."""

    home: Path
    url: str
    key: str
    process_id: int

    def database_url(self, role: str) -> str:
        """Where its database is found by that role."""
        command = [*COMMAND, "db-url", "--home", str(self.home), "--role", role]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def throwaway() -> Generator[Controller]:
    """Run a controller on an embedded PostgreSQL as it is by default; all of it goes when the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="fleetward-bench-"))
    # PostgreSQL may run as another user, who must be able to pass.
    folder.chmod(0o711)
    try:
        with (folder / "errors").open("wb") as errors:
            command = [*COMMAND, "serve", "--home", str(folder), "--listen", "127.0.0.1:0", "--log-level", "warning"]
            process = subprocess.Popen([*command, "--no-local-node"], stderr=errors)
            try:
                yield _when_ready(folder, process)
            finally:
                _stop(process)
        remove_cluster(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _when_ready(folder: Path, process: subprocess.Popen[bytes]) -> Controller:
    until = time.monotonic() + READY_SECONDS_MAX
    while time.monotonic() < until:
        if process.poll() is not None:
            said = (folder / "errors").read_bytes()[-LOG_SHOWN_BYTES:].decode("utf-8", "replace")
            raise BenchError(f"the controller ended with {process.returncode} before it was ready: {said.strip()}")
        try:
            found = msgspec.json.decode((folder / ANNOUNCEMENT).read_bytes(), type=Announcement)
        except (FileNotFoundError, msgspec.DecodeError):
            time.sleep(LOOK_SECONDS)
            continue
        return Controller(folder, found.url, (folder / OWNERS_KEY).read_text().strip(), process.pid)
    raise BenchError(f"the controller was not ready within {READY_SECONDS_MAX:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds of CPU that the controller's own process and its PostgreSQL have used so far."""

    controller: float
    postgres: float

    def since(self, earlier: "Used") -> "Used":
        """What was used between the two."""
        return Used(self.controller - earlier.controller, self.postgres - earlier.postgres)


def used(controller: Controller) -> Used | None:
    """Read the CPU that was used; nothing where the machine has no /proc."""
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():
        return None
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for path in proc.glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(process_id := int(path.parent.name))
        # Of itself, and of its children that have ended.
        seconds[process_id] = sum(map(int, fields[11:15])) / tick
    below, waiting = 0.0, list(children.get(controller.process_id, []))
    while waiting:
        one = waiting.pop()
        below += seconds.get(one, 0.0)
        waiting.extend(children.get(one, []))
    return Used(seconds.get(controller.process_id, 0.0), below)
