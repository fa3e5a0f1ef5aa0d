"""What every source file keeps to, so that no reviewer has to look for it."""

import ast
import re
from pathlib import PurePosixPath
from typing import Final

from tests.tidy.tree import ROOT, files, functions, parsed, sources

MODULE_LINES_MAX: Final = 600
FUNCTION_LINES_MAX: Final = 60  # a screen
NAMES_OF_NOTHING: Final = {
    "utils",
    "util",
    "common",
    "helpers",
    "helper",
    "base",
    "managers",
    "manager",
    "models",
    "misc",
}
SUPPRESSIONS: Final = re.compile("no" + "qa|type: ?" + "ignore|# ruff: ?no" + "qa")
POSTPONED: Final = re.compile(r"\b(TO" + "DO|FIX" + "ME|XX" + "X)\\b")
UNDONE: Final = re.compile(r"pytest\.(skip|xfail|importorskip|mark\.(skip|skipif|xfail))\b|unittest\.skip")
SLEEP: Final = re.compile(r"\btime\.sleep\(")
DOUBLE: Final = re.compile(r"\b(unittest\.mock|MagicMock|mocker)\b")
MACHINES: Final = re.compile(r"(?<![\w.$}/])/(work|root|home/\w+|Users/\w+)/|/tmp/" + r"fleet\b")
SPELLING: Final = re.compile("cancel" + r"ed\b")
# The orchestration's status is spelled so in its contract, and only there.
SPELLING_ALLOWED: Final = re.compile(
    r"workspace|orchestration|lifecycle|/(schema|lifecycles|statements)\.md$|/0001_foundation"
)
DANGEROUS: Final = {"eval", "exec", "compile"}
# Runs the program's own source with a mistake put into it, to see that the simulator finds the mistake.
PLANTS: Final = {"src/fleetward/sim/bugs.py"}
DANGEROUS_MODULES: Final = {"pickle", "marshal", "shelve", "yaml"}


def test_a_module_fits_in_600_lines() -> None:
    long = {
        name: n
        for name, text in sources("src", "tests", "tools", "bench")
        if (n := text.count("\n")) > MODULE_LINES_MAX
    }
    assert long == {}


def test_a_function_fits_a_screen() -> None:
    long = {
        f"{name}: {function}": lines
        for name, text in sources("src", "tests", "tools", "bench")
        for function, lines in functions(text)
        if lines > FUNCTION_LINES_MAX
    }
    assert long == {}


def test_a_module_says_what_it_owns_and_what_it_refuses_to_know() -> None:
    silent = [
        name
        for name, text in sources("src", "tools", "bench")
        if not re.search(r"\bOwns\b.*\bRefuses\b", ast.get_docstring(parsed(text)) or "", re.DOTALL)
        and PurePosixPath(name).name != "__main__.py"
    ]
    assert silent == []


def test_every_test_module_says_what_it_is_about() -> None:
    assert [name for name, text in sources("tests") if not ast.get_docstring(parsed(text))] == []


def test_no_module_is_named_after_nothing() -> None:
    parts = {
        part
        for name, _ in sources("src", "tests", "tools", "bench")
        for part in PurePosixPath(name).with_suffix("").parts
    }
    assert parts & NAMES_OF_NOTHING == set()


def test_every_package_has_a_docstring() -> None:
    package = ROOT / "src" / "fleetward"
    folders = {path.parent for path in package.rglob("*.py")}
    assert sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()) == []


def test_nothing_is_put_off_or_silenced() -> None:
    found = lines_with(POSTPONED) + lines_with(SUPPRESSIONS)
    assert found == []


def test_no_test_is_left_undone_but_by_naming_what_the_machine_lacks() -> None:
    assert lines_with(UNDONE, "tests/") == []


def test_no_test_sleeps_or_doubles_our_own_code() -> None:
    assert lines_with(SLEEP, "tests/") + lines_with(DOUBLE, "tests/") == []


def test_nothing_names_a_machine() -> None:
    assert lines_with(MACHINES) == []


def test_cancelled_has_two_ls() -> None:
    assert [
        line
        for line in lines_with(SPELLING)
        if not SPELLING_ALLOWED.search(line.split(":")[0]) and "orchestration" not in line
    ] == []


def test_nothing_runs_text_or_unpacks_objects() -> None:
    found: list[str] = []
    for name, text in sources("src", "tools", "bench"):
        if name in PLANTS:
            continue
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DANGEROUS:
                found.append(f"{name}:{node.lineno}: {node.func.id}()")
            modules = [module for module in imported(node) if module.split(".")[0] in DANGEROUS_MODULES]
            found.extend(f"{name}: {module}" for module in modules)
    assert found == []


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def lines_with(pattern: re.Pattern[str], below: str = "") -> list[str]:
    """Every line of ours in which the pattern stands, but in this file, which has to spell them."""
    found: list[str] = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(below) or name == "tests/tidy/test_sources.py":
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        found.extend(f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if pattern.search(line))
    return found
