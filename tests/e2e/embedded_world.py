"""What the tests of the embedded PostgreSQL share: homes that are cleaned up, controllers that can be killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import LiteralString, Self

import psycopg

from fleetward.controller.clusterfiles import Account, server_account
from fleetward.controller.embedded import EmbeddedPostgres, remove_cluster
from fleetward.controller.postmaster import PidFile, is_server_of, wait_for_end

PATIENCE = 60.0
CONTROLLER = Path(__file__).with_name("embedded_controller.py")
SOURCES = Path(__file__).parents[2] / "src"
PACKAGES = Path(psycopg.__file__).parents[1]


@dataclass(slots=True)
class Started:
    """A controller in a process of its own, and what it said."""

    process: subprocess.Popen[str]
    said: dict[str, str] = field(default_factory=dict[str, str])

    def hear(self) -> dict[str, str]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the controller ended without a word"
        self.said = json.loads(line)
        return self.said

    def end(self) -> int:
        self.process.communicate(timeout=PATIENCE)
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


class World:
    """Homes of one test; whatever was started in them is gone when it closes."""

    def __init__(self, template: Path | None) -> None:
        self._template = template
        self._closing = ExitStack()
        self._homes: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        for home in self._homes:
            self._clear(home)

    def folder(self) -> Path:
        """A folder that everybody may pass through, gone at the end."""
        made = Path(tempfile.mkdtemp(prefix="fw-", dir="/tmp"))
        made.chmod(0o711)
        self._closing.callback(shutil.rmtree, made, ignore_errors=True)
        return made

    def empty_home(self, name: str = "home", *, inside: Path | None = None) -> Path:
        """The path of a home that is not there yet."""
        home = (inside or self.folder()) / name
        self._homes.append(home)
        return home

    def home(self) -> Path:
        """A home with a cluster in it, copied from the template."""
        home = self.empty_home()
        subprocess.run(["cp", "-a", str(self.template), str(home)], check=True)
        return home

    def server(self, home: Path) -> EmbeddedPostgres:
        """The embedded PostgreSQL of the home, not started and in no hurry to the disk; stopped at the end."""
        return self._kept(EmbeddedPostgres(home, settings={"fsync": "off"}))

    def durable_server(self, home: Path) -> EmbeddedPostgres:
        """The same, as people have it."""
        return self._kept(EmbeddedPostgres(home))

    def _kept(self, server: EmbeddedPostgres) -> EmbeddedPostgres:
        self._closing.callback(server.stop)
        return server

    def controller(
        self,
        home: Path,
        *,
        account: Account | None = None,
        python: str = sys.executable,
        path: tuple[Path, ...] = (),
        within: tuple[str, ...] = (),
    ) -> Started:
        """A controller's process on this home, perhaps as another user or within a command; not heard yet."""
        process = subprocess.Popen(
            [*within, python, str(CONTROLLER), str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={"PATH": os.defpath, "PYTHONPATH": ":".join(map(str, [*path, SOURCES, PACKAGES]))},
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else [],
        )
        started = Started(process)
        self._closing.callback(started.kill)
        return started

    @property
    def template(self) -> Path:
        """The home that every other is copied from."""
        assert self._template is not None
        return self._template

    def _clear(self, home: Path) -> None:
        for data in (home / "pg", *(Path(text).joinpath("pg") for text in _record(home))):
            found = PidFile.read(data) if data.exists() else None
            if found is not None and is_server_of(found.pid, data, uid=data.stat().st_uid):
                os.kill(found.pid, signal.SIGQUIT)
                wait_for_end(found.pid, seconds=PATIENCE)
        if home.exists():
            remove_cluster(home)


def _record(home: Path) -> list[str]:
    with suppress(OSError):
        return [(home / "cluster").read_text().strip()]
    return []


def make_template(folder: Path) -> Path:
    """A stopped home with a cluster in it, to be copied."""
    home = folder / "template"
    with EmbeddedPostgres(home, settings={"fsync": "off"}):
        pass
    (home / "controller.lock").unlink()
    return home


def ask(url: str, question: LiteralString) -> object:
    """One value from the database."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(question).fetchone()
    assert row is not None
    return row[0]


def eventually(holds: Callable[[], bool], *, why: str) -> None:
    """Wait for another process to get somewhere, where it gives no signal."""
    pause = Event()
    for _ in range(int(PATIENCE / 0.002)):
        if holds():
            return
        pause.wait(0.002)
    raise AssertionError(f"not within {PATIENCE} s: {why}")


def serving() -> Account:
    """Whom the server runs as here."""
    return server_account([])
