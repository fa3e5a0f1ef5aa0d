"""The guard killer finds every condition, and tells a defended one from one that nobody would miss."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.tidy.tree import ROOT
from tools.guard_killer import conditions

RENEW: Final = """
    WITH held AS (
        SELECT id FROM leases
        WHERE node_id = %(node_id)s
          AND expires_at BETWEEN %(least)s
              AND %(most)s
          AND (
              state = 'assigned'
              OR state = 'running'
          )
          AND EXISTS (SELECT FROM nodes WHERE id = 1 AND note <> 'WHERE (')
        FOR UPDATE
    )
    UPDATE leases SET expires_at = CASE
        WHEN held.id > 0
          AND held.id < 9 THEN now
        END
    FROM held WHERE held.id = leases.id
"""


def test_every_condition_on_lines_of_its_own_is_found() -> None:
    assert [(line, text) for line, text, _ in conditions(RENEW)] == [
        (4, "WHERE node_id = %(node_id)s"),
        (5, "AND expires_at BETWEEN %(least)s AND %(most)s"),
        (7, "AND ( state = 'assigned' OR state = 'running' )"),
        (11, "AND EXISTS (SELECT FROM nodes WHERE id = 1 AND note <> 'WHERE (')"),
    ]


def test_a_condition_is_deleted_whole_and_nothing_else_is() -> None:
    whole = "SELECT 1\nFROM a\nWHERE b\n  AND (\n    c\n  )\n  AND d"
    assert [sql for _, _, sql in conditions(whole)] == [
        "SELECT 1\nFROM a\nWHERE true\n  AND (\n    c\n  )\n  AND d",
        "SELECT 1\nFROM a\nWHERE b\n  AND d",
        "SELECT 1\nFROM a\nWHERE b\n  AND (\n    c\n  )",
    ]


TESTED: Final = '''
"""One condition is defended, one is not, and one statement is run by no test."""

from dataclasses import dataclass

from fleetward.controller.store.tx import Statement


@dataclass(frozen=True, slots=True)
class Number:
    n: int


PICK = Statement(
    """
    SELECT n FROM generate_series(1, 9) AS s (n)
    WHERE n > %(least)s::int
      AND n < 100
    ORDER BY n
    """,
    row=Number,
)
UNUSED = Statement("SELECT 1 AS n\\nWHERE true", row=Number)


def test_it_picks(tx):
    assert tx.all(PICK, least=7) == [Number(8), Number(9)]
'''

TRIAL: Final = """
import sys

import test_picking

from tools.guard_killer import Killer, Mutant, conditions, run
from tools.pages.statements import Named

named = [Named("m", "PICK", test_picking.PICK), Named("m", "UNUSED", test_picking.UNUSED)]
killer = Killer([Mutant(one, *found) for one in named for found in conditions(one.statement.sql)], print)
status = run(killer, ["-c", "/dev/null", "-p", "tests.fix_database", sys.argv[1]])
print(killer.killed, [one.title for one in killer.survivors], [one.title for one in killer.untested], killer.broken)
print(test_picking.PICK.sql.count("AND"), int(status))
"""


def test_a_condition_that_no_test_defends_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "test_picking.py").write_text(TESTED)
    ended = subprocess.run(
        [sys.executable, "-c", TRIAL, str(tmp_path / "test_picking.py")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = ended.stdout.splitlines()
    assert said[-2:] == ["1 ['m.PICK:4: AND n < 100'] ['m.UNUSED:2: WHERE true'] []", "1 0"], (
        ended.stdout + ended.stderr
    )
