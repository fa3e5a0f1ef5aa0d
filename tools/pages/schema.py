"""The page of the schema, read from a database that the migrations have just made.

Owns how tables, rules, triggers and privileges are written down. Refuses to read the migrations' text:
what the database holds is what counts.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg

from fleetward.controller.embedded import EmbeddedPostgres
from fleetward.controller.store import migrate
from tools.pages.markdown import mono, page, table

TABLES: Final = """
    SELECT t.oid, t.relname, obj_description(t.oid, 'pg_class'), t.relkind::text
    FROM pg_class AS t
    WHERE t.relnamespace = 'public'::regnamespace
      AND t.relkind IN ('r', 'p', 'v')
      AND NOT t.relispartition
    ORDER BY t.relname
"""
COLUMNS: Final = """
    SELECT
        a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
        CASE WHEN a.attgenerated = 's' THEN 'always ' || pg_get_expr(d.adbin, d.adrelid)
             WHEN a.attidentity <> '' THEN 'identity'
             ELSE coalesce(pg_get_expr(d.adbin, d.adrelid), '') END,
        coalesce(col_description(a.attrelid, a.attnum), '')
    FROM pg_attribute AS a
    LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = %(table)s::oid
      AND a.attnum > 0
      AND NOT a.attisdropped
    ORDER BY a.attnum
"""
CONSTRAINTS: Final = """
    SELECT c.conname, pg_get_constraintdef(c.oid)
    FROM pg_constraint AS c
    WHERE c.conrelid = %(table)s::oid
      AND c.contype <> 'n'
      AND c.contype <> 't'
    ORDER BY array_position(ARRAY['p', 'u', 'x', 'f', 'c'], c.contype::text), c.conname
"""
INDEXES: Final = """
    SELECT i.relname, regexp_replace(pg_get_indexdef(i.oid), '^CREATE (UNIQUE )?INDEX \\S+ ON (ONLY )?\\S+ ', '\\1')
    FROM pg_index AS x
    JOIN pg_class AS i ON i.oid = x.indexrelid
    WHERE x.indrelid = %(table)s::oid
      AND NOT EXISTS (SELECT FROM pg_constraint AS c WHERE c.conindid = i.oid AND c.contype IN ('p', 'u', 'x'))
    ORDER BY i.relname
"""
TRIGGERS: Final = """
    SELECT
        t.tgname,
        regexp_replace(
            pg_get_triggerdef(t.oid, true), '^CREATE (CONSTRAINT )?TRIGGER \\S+ (.*?) ON \\S+ (.*)$', '\\1\\2 \\3'
        )
    FROM pg_trigger AS t
    WHERE t.tgrelid = %(table)s::oid
      AND NOT t.tgisinternal
    ORDER BY t.tgname
"""
PRIVILEGES: Final = """
    SELECT role, string_agg(said, '; ' ORDER BY said)
    FROM (
        SELECT g.grantee::regrole::text AS role, g.privilege_type AS said
        FROM pg_class AS t, aclexplode(t.relacl) AS g
        WHERE t.oid = %(table)s::oid AND g.grantee <> t.relowner AND g.grantee <> 0
        UNION ALL
        SELECT g.grantee::regrole::text,
            g.privilege_type || ' (' || string_agg(a.attname, ', ' ORDER BY a.attnum) || ')'
        FROM pg_attribute AS a, aclexplode(a.attacl) AS g
        WHERE a.attrelid = %(table)s::oid AND g.grantee <> 0
        GROUP BY g.grantee, g.privilege_type
    ) AS granted
    GROUP BY role
    ORDER BY role
"""
ENUMS: Final = """
    SELECT t.typname, string_agg('`' || e.enumlabel || '`', ', ' ORDER BY e.enumsortorder)
    FROM pg_enum AS e
    JOIN pg_type AS t ON t.oid = e.enumtypid
    GROUP BY t.typname
    ORDER BY t.typname
"""
FUNCTIONS: Final = """
    SELECT
        p.oid::regprocedure::text, coalesce(obj_description(p.oid, 'pg_proc'), '')
    FROM pg_proc AS p
    WHERE p.pronamespace IN ('app'::regnamespace, 'public'::regnamespace)
    ORDER BY p.oid::regprocedure::text
"""


def text() -> str:
    """Write the page from a database made for the purpose, and thrown away."""
    with tempfile.TemporaryDirectory(prefix="fleetward-docs-") as folder, EmbeddedPostgres(Path(folder)) as server:
        migrate.init_cluster(server.url())
        return of_database(server.url(database=migrate.DATABASE))


def of_database(url: str) -> str:
    """Write the page from a migrated database, read as a role that sees all of it."""
    with psycopg.connect(url) as connection:
        connection.execute("SET search_path TO public, pg_catalog")
        tables = _rows(connection, TABLES)
        names = ", ".join(f"[`{name}`](#{name})" for _, name, _, _ in tables)
        enums = _rows(connection, ENUMS)
        functions = [(mono(str(name)), str(said)) for name, said in _rows(connection, FUNCTIONS)]
        return page(
            "Schema",
            "`src/fleetward/controller/store/migrations/`",
            "Every rule that must never break stands here, not in Python. The service's role `fleetward_app` may do "
            "what is listed under *may*, and nothing else.",
            names,
            *(_table(connection, *found) for found in tables),
            "## Types\n\n" + table(["type", "values"], [(mono(str(name)), str(said)) for name, said in enums])
            if enums
            else "",
            "## Functions\n\n" + table(["function", "what it does"], functions),
        )


def _rows(connection: psycopg.Connection, query: LiteralString, **params: object) -> list[tuple[Any, ...]]:
    return connection.execute(query, params).fetchall()


def _table(connection: psycopg.Connection, oid: int, name: str, comment: str | None, _kind: str) -> str:
    columns = [
        (mono(column), kind, "" if is_needed else "null", mono(default), said)
        for column, kind, is_needed, default, said in _rows(connection, COLUMNS, table=oid)
    ]
    parts = [f"## {name}", comment or "", table(["column", "type", "", "default", "what it is"], columns)]
    parts.append(_listed("Rules", _rows(connection, CONSTRAINTS, table=oid)))
    parts.append(_listed("Indexes", _rows(connection, INDEXES, table=oid)))
    parts.append(_listed("Triggers", _rows(connection, TRIGGERS, table=oid)))
    parts.append(_listed("May", _rows(connection, PRIVILEGES, table=oid)))
    return "\n\n".join(part for part in parts if part)


def _listed(heading: str, rows: Iterable[tuple[Any, ...]]) -> str:
    lines = [f"- `{name}`: {mono(said)}" for name, said in rows]
    return f"**{heading}**\n\n" + "\n".join(lines) if lines else ""
