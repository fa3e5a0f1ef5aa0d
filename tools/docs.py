"""`make docs`: writes docs/reference/ from the code, or says which page is stale.

Owns which pages there are and where they lie. Refuses to know what stands in them: `tools.pages` does.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tools.pages import cli, config, endpoints, errors, lifecycles, schema, statements

REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "cli": cli.text,
    "config": config.text,
    "endpoints": endpoints.text,
    "errors": errors.text,
    "lifecycles": lifecycles.text,
    "schema": schema.text,
    "statements": statements.text,
}


def stale(name: str) -> str | None:
    """The page as it should be, or None where it already is so."""
    path = REFERENCE / f"{name}.md"
    text = PAGES[name]()
    return None if path.exists() and path.read_text(encoding="utf-8") == text else text


def main() -> int:
    """Write every page, or with --check only say what would change."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a page is stale")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="only these pages")
    given = parser.parse_args()
    changed = {name: text for name in given.pages or PAGES if (text := stale(name)) is not None}
    if given.check:
        for name in changed:
            print(f"docs/reference/{name}.md does not say what the code says: run `make docs` and read what changed")
        return 1 if changed else 0
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, text in changed.items():
        (REFERENCE / f"{name}.md").write_text(text, encoding="utf-8")
        print(f"wrote {REFERENCE / f'{name}.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
