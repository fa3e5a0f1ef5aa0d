"""The page of commands.

Owns how a command is written down. Refuses to run any.
"""

from collections.abc import Iterator
from typing import Any, Final

from fleetward.cli.main import command_tree
from tools.pages.markdown import code, mono, page, sentence, table

KINDS: Final = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER"}


def text() -> str:
    """Write the page."""
    root: Any = command_tree()
    return page(
        "Commands",
        "`src/fleetward/cli/`",
        "Every command takes `--url`, `--token`, `--json` and `--quiet`, before or after its name. With `--json`, "
        "standard output holds one JSON document or JSON lines, and nothing else.",
        "Exit status: 0 done; 1 the thing asked about failed; 2 usage; 3 refused; 4 unreachable, or a fault of the "
        "server; and for `agent` 5 this node was removed, 6 the agent is too old.",
        *_commands(root, "fleetward"),
    )


def _commands(group: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        whole = f"{path} {name}"
        if hasattr(command, "commands"):
            yield f"## {whole}\n\n{sentence(command.help)}"
            yield from _commands(command, whole)
        else:
            yield _command(command, whole)


def _command(command: Any, path: str) -> str:
    shared = {"url", "token", "json", "quiet", "help"}
    params = [param for param in command.params if param.name not in shared and not getattr(param, "hidden", False)]
    rows = [(mono(_spelled(param)), _default(param), sentence(getattr(param, "help", ""))) for param in params]
    depth = "##" if path.count(" ") == 1 else "###"
    example = str(command.epilog or "").removeprefix("Example: ")
    parts = [
        f"{depth} {path}",
        sentence(command.help),
        table(["takes", "default", "what it is"], rows) if rows else "",
        code(example, "sh") if example else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _spelled(param: Any) -> str:
    if not param.opts[0].startswith("-"):
        return str(param.metavar or param.name.upper())
    spelled = ", ".join(sorted([*param.opts, *param.secondary_opts], key=len))
    if getattr(param, "is_flag", False):
        return spelled
    choices = getattr(param.type, "choices", ())
    return f"{spelled} {param.metavar or '/'.join(choices) or KINDS.get(param.type.name, param.type.name.upper())}"


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if param.default in {None, False, ""} or callable(param.default):
        return ""
    return mono(str(param.default))
