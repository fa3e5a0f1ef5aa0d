"""The files of this repository, as the tidy tests read them.

Owns which files are ours. Refuses to ask git: a copy without its history is checked the same way.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("src", "tests", "tools", "bench", "docs", "changelog.d", ".ci")
PLAIN: Final = {".py", ".sql", ".md", ".toml", ".txt", ".sh", ".html", ".css", ".js", ".mjs", ""}


@cache
def files() -> tuple[Path, ...]:
    """Every file of ours that holds text."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found.extend(path for path in (ROOT / folder).rglob("*") if path.is_file())
    return tuple(sorted(path for path in found if path.suffix in PLAIN and "__pycache__" not in path.parts))


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Name and text of every Python file in these folders."""
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and name.startswith(tuple(f"{folder}/" for folder in folders)):
            yield name, path.read_text(encoding="utf-8")


def documents() -> Iterator[tuple[str, str]]:
    """Name and text of every document."""
    for path in files():
        if path.suffix == ".md":
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


@cache
def parsed(text: str) -> ast.Module:
    """The tree of a source."""
    return ast.parse(text)


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and length of every function of a source."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1
