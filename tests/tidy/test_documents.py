"""What every document keeps to: it is true where a test can tell."""

import importlib
import re
from pathlib import Path
from typing import Final

import pytest

from tests.tidy.tree import ROOT, documents

FRAGMENT: Final = re.compile(r"\+[a-z0-9-]+\.(added|changed|fixed|removed|security)\.md")
DOTTED: Final = re.compile(
    r"`((?:domain|wire|verify|client|controller|agent|cli|sim|store|services|scheduler)(?:\.(?!lock|pid|log)\w+)+)`"
)
PATHS: Final = re.compile(r"`((?:src|docs|tests|tools|bench|changelog\.d)/[\w./-]+)`")
SHORT: Final = {"store": "controller.store", "services": "controller.services", "scheduler": "controller.scheduler"}
RECORD_PARTS: Final = ("## Decision", "## Why", "## What it costs")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_a_document_has_one_title() -> None:
    titles = {name: len(re.findall(r"^# ", without_code(text), re.MULTILINE)) for name, text in documents()}
    assert {name: n for name, n in titles.items() if n != 1 and not name.startswith("changelog.d/")} == {}


def test_every_link_leads_somewhere() -> None:
    links = [
        (name, target)
        for name, text in documents()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", without_code(text))
        if "://" not in target
    ]
    assert [link for link in links if not (ROOT / Path(link[0]).parent / link[1]).exists()] == []


def test_every_path_that_a_document_names_exists() -> None:
    named = {(name, path) for name, text in documents() for path in PATHS.findall(without_code(text))}
    assert sorted((name, path) for name, path in named if not (ROOT / path).exists()) == []


def test_every_function_that_a_document_names_exists() -> None:
    named = {(name, dotted) for name, text in documents() for dotted in DOTTED.findall(without_code(text))}
    assert sorted((name, dotted) for name, dotted in named if not exists(dotted)) == []


def exists(dotted: str) -> bool:
    first, _, rest = dotted.partition(".")
    dotted = dotted.removesuffix(".py")
    parts = f"fleetward.{SHORT.get(first, first)}.{rest}".split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def test_the_readme_names_the_command_that_ci_runs() -> None:
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("exec make test")


def test_every_command_of_make_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {command for _, text in documents() for command in re.findall(r"`make ([a-z-]+)", text)}
    assert named - targets == set()


@pytest.mark.parametrize("fragment", sorted(path.name for path in (ROOT / "changelog.d").iterdir()))
def test_a_changelog_fragment_is_well_formed(fragment: str) -> None:
    if fragment in {"README.md", ".gitkeep"}:
        return
    assert FRAGMENT.fullmatch(fragment), "name it +SLUG.KIND.md; kinds: added, changed, fixed, removed, security"
    text = (ROOT / "changelog.d" / fragment).read_text(encoding="utf-8").strip()
    assert text.endswith("."), "a fragment is a sentence for the person who upgrades"
    assert not text.startswith(("#", "-", "*")), "a fragment is a sentence, not a heading or a list"


def test_decision_records_are_numbered_without_gaps_and_complete() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    lacking = [
        f"{path.name}: {part}"
        for path in records
        for part in RECORD_PARTS
        if part not in path.read_text(encoding="utf-8")
    ]
    assert lacking == []
