"""The demo's work: an index of Python's own standard library, as JSON and as a picture.

Owns what is counted and how it is drawn. Refuses to import anything beyond the standard library, since it
runs by itself on a node, sent along as the job's input.
Same Python, same bytes: no clock and no chance in it, so that two nodes can be compared.
"""

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.BoolOp, ast.IfExp, ast.comprehension)
WIDTH, HEIGHT, HEADER = 1200.0, 760.0, 40.0
LABEL_WIDTH = 7.5  # of one character at the picture's text size


@dataclass(frozen=True)
class Module:
    """What one module holds."""

    name: str
    lines: int
    classes: int
    functions: int
    branches: int
    documented: int
    longest_function: str
    longest_function_lines: int
    imports: list[str]


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture."""

    x: float
    y: float
    width: float
    height: float


def sources(root: Path) -> Iterator[Path]:
    """Every module of the library itself, in order."""
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED & set(path.relative_to(root).parts):
            yield path


def look_into(root: Path, path: Path) -> Module | None:
    """Read one module, or nothing when it is not Python of this version."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError, OSError):
        return None
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [((node.end_lineno or node.lineno) - node.lineno + 1, node.name) for node in functions]
    longest = max(lengths, default=(0, ""))
    parts = list(path.relative_to(root).with_suffix("").parts)
    return Module(
        name=".".join(parts[:-1] if parts[-1] == "__init__" else parts),
        lines=text.count("\n"),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        functions=len(functions),
        branches=sum(isinstance(node, BRANCHES) for node in nodes),
        documented=sum(ast.get_docstring(node) is not None for node in functions),
        longest_function=longest[1],
        longest_function_lines=longest[0],
        imports=sorted({name for node in nodes for name in _imported(node)}),
    )


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.partition(".")[0]]
    return []


def layout(sizes: Sequence[float], box: Box) -> list[Box]:
    """Divide a box in proportion, halving the sum each time, so that the parts stay near squares."""
    if len(sizes) == 1:
        return [box]
    total, taken, cut = sum(sizes), 0.0, 0
    while cut < len(sizes) - 1 and (cut == 0 or taken + sizes[cut] / 2 < total / 2):
        taken += sizes[cut]
        cut += 1
    share = taken / total
    if box.width >= box.height:
        first = Box(box.x, box.y, box.width * share, box.height)
        rest = Box(box.x + first.width, box.y, box.width - first.width, box.height)
    else:
        first = Box(box.x, box.y, box.width, box.height * share)
        rest = Box(box.x, box.y + first.height, box.width, box.height - first.height)
    return layout(sizes[:cut], first) + layout(sizes[cut:], rest)


def picture(modules: Sequence[Module]) -> str:
    """Draw every package as a box: its area is its lines, its colour how much its code branches."""
    packages: dict[str, list[Module]] = {}
    for module in modules:
        packages.setdefault(module.name.partition(".")[0], []).append(module)
    sums = {name: sum(module.lines for module in held) for name, held in packages.items()}
    order = sorted((name for name in sums if sums[name]), key=lambda name: (-sums[name], name))
    boxes = layout([float(sums[name]) for name in order], Box(0.0, HEADER, WIDTH, HEIGHT - HEADER))
    title = f"Python {sys.version.split()[0]}: {len(modules)} modules, {sum(sums.values()):,} lines"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH:g}" height="{HEIGHT:g}" fill="#fff"/>',
        f'<text x="8" y="27" font-size="20">{escape(title)}; area: lines, red: branches</text>',
    ]
    for name, box in zip(order, boxes, strict=True):
        density = sum(module.branches for module in packages[name]) / sums[name]
        drawn.append(_box(name, sums[name], density, box))
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _box(name: str, lines: int, density: float, box: Box) -> str:
    warmth = min(1.0, density / 0.3)
    colour = f"hsl({210 - 200 * warmth:.0f} 60% {78 - 18 * warmth:.0f}%)"
    place = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
    drawn = f'<rect {place} fill="{colour}" stroke="#fff"><title>{escape(name)}: {lines:,} lines</title></rect>'
    if len(name) * LABEL_WIDTH + 6 < box.width and box.height > 16:
        drawn += f'<text x="{box.x + 3:.1f}" y="{box.y + 13:.1f}" font-size="12">{escape(name)}</text>'
    return drawn


def say(text: str) -> None:
    """Tell the log how far the work is."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(json_path: str, svg_path: str) -> None:
    """Index the library of the Python that runs this."""
    root = Path(sysconfig.get_path("stdlib"))
    modules: list[Module] = []
    for path in sources(root):
        module = look_into(root, path)
        if module is not None:
            modules.append(module)
            if len(modules) % 100 == 0:
                say(f"{len(modules)} modules, {sum(found.lines for found in modules):,} lines")
    totals = {
        key: sum(getattr(module, key) for module in modules)
        for key in ("lines", "classes", "functions", "branches", "documented")
    }
    index = {"python": sys.version.split()[0], "totals": totals, "modules": [asdict(module) for module in modules]}
    Path(json_path).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    Path(svg_path).write_text(picture(modules), encoding="utf-8")
    say(f"done: {len(modules)} modules, {totals['functions']:,} functions, {totals['classes']:,} classes")


if __name__ == "__main__":
    main(*sys.argv[1:])
