"""Markdown, as the pages need it.

Owns tables, code and the line that says where a page comes from. Refuses to know any page.
"""

from collections.abc import Iterable, Sequence


def page(title: str, origin: str, *parts: str) -> str:
    """A whole page: its heading, where it is generated from, its parts."""
    note = f"<!-- Generated from {origin} by `make docs`; do not edit. -->"
    return "\n\n".join([f"# {title}", note, *(part.strip("\n") for part in parts if part.strip())]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a pipe within a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def code(text: str, language: str = "") -> str:
    """A block of code."""
    return f"```{language}\n{text.strip(chr(10))}\n```"


def mono(text: str) -> str:
    """Code within a line, or nothing."""
    return f"`{text}`" if text else ""


def sentence(docstring: str | None) -> str:
    """A docstring as running text."""
    return " ".join((docstring or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
