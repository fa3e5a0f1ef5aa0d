"""Every Statement of the store is prepared against the migrated schema, and gives exactly the row that it says."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from types import NoneType

import psycopg
import pytest
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer

from fleetward.controller import store
from fleetward.controller.store.tx import Statement


def _statements() -> Iterator[tuple[str, Statement[object]]]:
    for module in pkgutil.iter_modules(store.__path__):
        for name, value in vars(importlib.import_module(f"{store.__name__}.{module.name}")).items():
            if isinstance(value, Statement):
                yield f"{module.name}.{name}", value


STATEMENTS = dict(_statements())
SPELLED_IN_PYTHON = {
    "uuid": {"UUID"}, "text": {"str"}, "int4": {"int"}, "int8": {"int"}, "int2": {"int"}, "bool": {"bool"},
    "float8": {"float"}, "bytea": {"bytes"}, "timestamptz": {"datetime"}, "interval": {"timedelta"},
    "_uuid": {"list[UUID]"}, "_text": {"list[str]"}, "_int4": {"list[int]"}, "_int8": {"list[int]"},
}  # fmt: skip


def _prepared(connection: psycopg.Connection, statement: Statement[object]) -> list[tuple[str, str]]:
    query = PostgresQuery(Transformer(connection))
    names = {name: None for name in _placeholders(statement.sql)}
    query.convert(statement.sql, names)
    connection.pgconn.prepare(b"checked", query.query)
    described = connection.pgconn.describe_prepared(b"checked")
    if described.error_message:
        raise AssertionError(described.error_message.decode())
    columns = [((described.fname(i) or b"").decode(), described.ftype(i)) for i in range(described.nfields)]
    kinds = dict(connection.execute("SELECT oid::int8, typname::text FROM pg_type").fetchall())
    return [(name, kinds[oid]) for name, oid in columns]


def _placeholders(text: str) -> list[str]:
    import re

    return re.findall(r"%\((\w+)\)s", text)


@pytest.mark.parametrize("name", sorted(STATEMENTS))
def test_a_statement_is_prepared_and_gives_the_row_that_it_says(name, app):
    statement = STATEMENTS[name]
    found = _prepared(app, statement)
    if statement.row is NoneType:
        assert found == []
        return
    assert dataclasses.is_dataclass(statement.row)
    fields = {field.name: field.type for field in dataclasses.fields(statement.row)}
    assert [column for column, _ in found] == list(dict.fromkeys(column for column, _ in found))
    assert sorted(column for column, _ in found) == sorted(fields)
