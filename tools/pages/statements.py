"""The page of statements: all SQL that the controller runs.

Owns how a statement is written down, and how all of them are found. Refuses to run any.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent
from typing import Any, cast

from fleetward.controller import store
from fleetward.controller.store.tx import Statement
from tools.pages.markdown import code, page, table


@dataclass(frozen=True, slots=True)
class Named:
    """A statement with the module and the name that it has there."""

    module: str
    name: str
    statement: Statement[Any]


def statements() -> Iterator[Named]:
    """Every statement of the store, module by module in the order of the source."""
    for found in sorted(pkgutil.iter_modules(store.__path__), key=lambda module: module.name):
        module = importlib.import_module(f"{store.__name__}.{found.name}")
        written = set(re.findall(r"^(\w+)(?:: .+)? = ", inspect.getsource(module), re.MULTILINE))
        for name, value in vars(module).items():
            # A statement that another module imports is listed once, where it is written.
            if isinstance(value, Statement) and name in written:
                yield Named(found.name, name, cast("Statement[Any]", value))


def text() -> str:
    """Write the page."""
    parts: list[str] = []
    rows: list[tuple[str, str]] = []
    module = ""
    for found in statements():
        if found.module != module:
            module = found.module
            parts.append(f"## {module}")
        fields = _columns(found.statement)
        rows.append((f"[`{found.module}.{found.name}`](#{found.module}{found.name.lower()})", fields or "no rows"))
        said = f"Gives {fields}." if fields else "Gives no rows."
        parts.append(f"### {found.module}.{found.name}\n\n{said}\n\n{code(dedent(found.statement.sql), 'sql')}")
    return page(
        "Statements",
        "`src/fleetward/controller/store/`",
        "All SQL that the controller runs, each beside the columns that it gives. A test prepares every one against "
        "the migrated schema and compares its columns with the type of its rows.",
        table(["statement", "gives"], rows),
        *parts,
    )


def _columns(statement: Statement[Any]) -> str:
    if not dataclasses.is_dataclass(statement.row):
        return ""
    return ", ".join(f"`{field.name}`" for field in dataclasses.fields(statement.row))
