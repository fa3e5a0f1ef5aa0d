"""What the tests of the command line share: a home of their own, and `fleetward` as a person types it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[2] / "src"
PATIENCE = 90.0


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What it answered in JSON: one document, and nothing else on standard output."""
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class House:
    """A home, a folder to work in, and one for what is temporary."""

    home: Path
    work: Path
    temporary: Path

    @property
    def environment(self) -> dict[str, str]:
        """A person's environment, without any settings of whoever runs the tests."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("FLEETWARD_")}
        ours = {"FLEETWARD_HOME": self.home, "PYTHONPATH": SOURCES, "TMPDIR": self.temporary, "NO_COLOR": "1"}
        return clean | {name: str(value) for name, value in ours.items()}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Type a command and do not wait for its end."""
        # What runs in the background ignores Ctrl-C and hands that on; a person's shell does not.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return subprocess.Popen(
            [sys.executable, "-m", "fleetward", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.work,
            env=self.environment,
        )

    def type(self, *arguments: str) -> Done:
        """Type a command and wait for its end."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=PATIENCE)
        return Done(process.returncode, out, err)


@contextlib.contextmanager
def a_house() -> Generator[House]:
    """A home below a folder that every user may enter, as the machines of the tests have it; gone afterwards."""
    top = Path(tempfile.mkdtemp(prefix="fwcli-"))
    top.chmod(0o755)
    house = House(home=top / "home", work=top / "work", temporary=top / "t")
    house.work.mkdir()
    house.temporary.mkdir()
    try:
        yield house
    finally:
        house.type("down")
        shutil.rmtree(top, ignore_errors=True)
