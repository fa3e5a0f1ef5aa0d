"""The reference says what the code says."""

import pytest

from tests.fix_database import Clone
from tools.docs import PAGES, REFERENCE, stale
from tools.pages import errors, schema


@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"schema"}))
def test_a_page_is_fresh(name: str) -> None:
    assert stale(name) is None, f"docs/reference/{name}.md is stale: run `make docs` and read what changed"


def test_the_page_of_the_schema_is_fresh(shared_clone: Clone) -> None:
    written = (REFERENCE / "schema.md").read_text(encoding="utf-8")
    assert schema.of_database(shared_clone.admin_url) == written, "docs/reference/schema.md is stale: run `make docs`"


def test_every_error_code_has_its_heading() -> None:
    written = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    assert {found.code for found in errors.classes() if f"\n## {found.code}\n" not in written} == set()


def test_every_error_says_what_it_means() -> None:
    assert [found.__name__ for found in errors.classes() if not (found.__doc__ or "").strip().endswith(".")] == []


def test_every_page_is_generated() -> None:
    assert sorted(path.stem for path in REFERENCE.glob("*.md")) == sorted(PAGES)
