"""Every Statement of the store is prepared against the migrated schema, and gives exactly the row that it says."""

import dataclasses
import importlib
import pkgutil
import re
import types
import typing
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from types import NoneType
from uuid import UUID

import psycopg
import pytest

from fleetward.controller import store
from fleetward.controller.store.tx import Statement

PLACEHOLDER = re.compile(r"%\((\w+)\)s")
PYTHON: dict[str, object] = {
    "bool": bool,
    "bytea": bytes,
    "date": date,
    "float8": float,
    "int2": int,
    "int4": int,
    "int8": int,
    "interval": timedelta,
    "text": str,
    "timestamptz": datetime,
    "uuid": UUID,
}
JSON = ("dict", "list", "object")


def _statements() -> Iterator[tuple[str, Statement[object]]]:
    """The statements of all modules, also those that a tuple or a mapping holds."""
    for module in pkgutil.iter_modules(store.__path__):
        for name, value in vars(importlib.import_module(f"{store.__name__}.{module.name}")).items():
            for inner, statement in _within(value):
                yield f"{module.name}.{name}{inner}", statement


def _within(value: object) -> Iterator[tuple[str, Statement[object]]]:
    if isinstance(value, Statement):
        yield "", value
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from ((f"[{index}]{inner}", statement) for inner, statement in _within(part))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from ((f"[{key!r}]{inner}", statement) for inner, statement in _within(part))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from ((f".{field.name}{inner}", found) for inner, found in _within(getattr(value, field.name)))


STATEMENTS = dict(_statements())


def _described(connection: psycopg.Connection, statement: Statement[object]) -> list[tuple[str, str]]:
    """Prepare it as the driver would, have it planned; the name and PostgreSQL's type of each column."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f"${numbers.setdefault(match[1], len(numbers) + 1)}"

    text = PLACEHOLDER.sub(number, statement.sql).replace("%%", "%")
    prepared = connection.pgconn.prepare(b"checked", text.encode())
    assert not prepared.error_message, prepared.error_message.decode()
    found = connection.pgconn.describe_prepared(b"checked")
    # A plan is where the rights of the role on each table and column are checked.
    given = f" ({', '.join(['NULL'] * len(numbers))})" if numbers else ""
    connection.execute(f"EXPLAIN EXECUTE checked{given}".encode())
    kinds = dict(connection.execute("SELECT oid::int8, typname::text FROM pg_type").fetchall())
    return [((found.fname(nth) or b"").decode(), kinds[found.ftype(nth)]) for nth in range(found.nfields)]


def _takes(annotation: object, kind: str) -> bool:
    """Whether a field of that annotation can hold what the driver makes of that type."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        origin = typing.get_origin(option) or option
        if kind in {"json", "jsonb"} and getattr(origin, "__name__", "") in JSON:
            return True
        if kind.startswith("_") and origin is list and _takes(typing.get_args(option)[0], kind[1:]):
            return True
        if option is PYTHON.get(kind):
            return True
    return False


@pytest.mark.parametrize("name", sorted(STATEMENTS))
def test_the_service_may_run_a_statement_and_it_gives_the_row_that_it_says(name, app):
    statement = STATEMENTS[name]
    found = _described(app, statement)
    if statement.row is NoneType:
        assert found == []
        return
    assert dataclasses.is_dataclass(statement.row)
    expected = typing.get_type_hints(statement.row)
    assert sorted(column for column, _ in found) == sorted(expected)
    wrong = {column: (kind, expected[column]) for column, kind in found if not _takes(expected[column], kind)}
    assert wrong == {}


def test_statements_are_found():
    assert len(STATEMENTS) > 70
