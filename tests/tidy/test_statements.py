"""How SQL is written: one condition a line, so that each can be deleted by itself."""

import re
from typing import Final

from tools.pages.statements import statements

QUOTED: Final = re.compile(r"'(?:[^']|'')*'")
BETWEEN: Final = re.compile(r"\bBETWEEN\s+\S+\s+AND\b", re.IGNORECASE)

CLOCKS: Final = r"\b(now|clock_timestamp|statement_timestamp|transaction_timestamp)\(\)|\bcurrent_(timestamp|date)\b"


def outside_brackets(line: str) -> str:
    """The line without what stands in brackets and quotes."""
    bare, depth = "", 0
    for letter in QUOTED.sub("''", line):
        depth += letter == "("
        if depth <= 0:
            bare += letter
        depth -= letter == ")"
    return bare


def test_a_condition_has_a_line_of_its_own() -> None:
    crowded: list[str] = []
    for found in statements():
        for line in found.statement.sql.splitlines():
            bare = BETWEEN.sub("", outside_brackets(line))
            if re.match(r"\s*(WHERE|AND)\b", bare) and re.search(r"\S\s+AND\b", bare):
                crowded.append(f"{found.module}.{found.name}: {line.strip()}")
    assert crowded == []


def test_time_comes_from_the_transaction() -> None:
    clock = re.compile(CLOCKS, re.IGNORECASE)
    found = [
        f"{one.module}.{one.name}" for one in statements() if clock.search(one.statement.sql.replace("app.now()", ""))
    ]
    assert found == [], "bind %(now)s: the transaction's own reading of the clock"


def test_every_statement_names_its_columns() -> None:
    every = re.compile(r"(SELECT|RETURNING)\s+(\w+\.)?\*\s+(?!FROM unnest)", re.IGNORECASE)
    assert [
        f"{one.module}.{one.name}" for one in statements() if re.search(every, one.statement.sql.split(")\n")[-1])
    ] == []
