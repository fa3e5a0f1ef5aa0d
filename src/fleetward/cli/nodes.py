"""`fleetward node …`: the fleet's machines.

Owns how nodes are shown. Refuses to know how they are chosen.
"""

from collections.abc import Iterator
from typing import Annotated, Final, cast

import typer

from fleetward.cli.output import counts, instant, size
from fleetward.cli.settings import settings_of
from fleetward.cli.words import parse_duration, parse_pairs
from fleetward.client import Client
from fleetward.wire import messages as m

PAGE: Final = 200

app = typer.Typer(no_args_is_help=True, help="Pair machines and look at them.")


@app.command(epilog="Example: fleetward node pair --label zone=lab --expires 10m")
def pair(
    ctx: typer.Context,
    label: Annotated[list[str] | None, typer.Option(metavar="K=V", help="A label that the node will have.")] = None,
    expires: Annotated[str, typer.Option(metavar="TIME", help="How long the code is good.")] = "10m",
) -> None:
    """Make a one-time code that turns a machine into a node."""
    settings = settings_of(ctx)
    request = m.PairingCodeRequest(
        labels=parse_pairs(label or []), expires_seconds=int(parse_duration(expires).total_seconds())
    )
    code = settings.client().make_pairing_code(request)
    if settings.output.is_json:
        settings.output.document(code)
        return
    settings.output.note(f"On the machine, before {instant(code.expires_at)}; it works once:")
    settings.output.line(f"fleetward join '{code.join_string}'")


@app.command("ls", epilog="Example: fleetward node ls --json")
def listing(ctx: typer.Context) -> None:
    """List the nodes by name."""
    settings = settings_of(ctx)
    nodes = list(all_nodes(settings.client()))
    if settings.output.is_json:
        settings.output.document(nodes)
        return
    settings.output.table(
        ("name", "status", "cpus", "memory", "held", "sandbox", "seen"),
        (
            (
                node.name,
                node.status if node.eligible else f"{node.status} ({node.eligible_reason or 'cordoned'})",
                f"{node.cpus_milli / 1000:g}",
                size(node.memory_bytes),
                str(node.held),
                sandbox_of(node),
                instant(node.seen_at),
            )
            for node in nodes
        ),
    )


@app.command(epilog="Example: fleetward node show ada")
def show(ctx: typer.Context, name: Annotated[str, typer.Argument(help="The node's name.")]) -> None:
    """Show one node."""
    settings = settings_of(ctx)
    node = settings.client().show_node(name)
    if settings.output.is_json:
        settings.output.document(node)
        return
    settings.output.fields(
        (
            ("name", node.name),
            ("id", str(node.id)),
            ("status", node.status),
            ("gets new work", "yes" if node.eligible else f"no: {node.eligible_reason or 'cordoned'}"),
            ("held", counts({"assignments": node.held})),
            ("cpus", f"{node.cpus_milli / 1000:g}"),
            ("memory", size(node.memory_bytes)),
            ("labels", " ".join(f"{key}={value}" for key, value in node.labels.items())),
            ("mac", node.mac or "none; named by hand"),
            ("session", f"{node.session} (key epoch {node.key_epoch})"),
            ("sandbox", ": ".join(filter(None, (sandbox_of(node), sandbox_lack(node))))),
            ("system", " ".join(str(node.inventory.get(key, "")) for key in ("os", "arch", "agent_version"))),
            ("load", ", ".join(f"{key} {value}" for key, value in node.load.items())),
            ("seen", instant(node.seen_at)),
            ("created", instant(node.created_at)),
        )
    )


def all_nodes(client: Client) -> Iterator[m.Node]:
    """Every node, page by page."""
    after: str | None = None
    while True:
        page = client.list_nodes(limit=PAGE, after=after)
        yield from page.items
        after = page.next
        if after is None:
            return


def sandbox_of(node: m.Node) -> str:
    """Say plainly whether commands on the node are boxed in, and by what."""
    told = node.inventory.get("sandbox")
    return str(cast("dict[str, object]", told).get("sandbox", "unknown")) if isinstance(told, dict) else "unknown"


def sandbox_lack(node: m.Node) -> str:
    """Why the node has no sandbox, in its own words."""
    told = node.inventory.get("sandbox")
    return str(cast("dict[str, object]", told).get("why_not", "")) if isinstance(told, dict) else ""


def has_sandbox(node: m.Node) -> bool:
    """Whether the node said that its sandbox works."""
    return sandbox_of(node) not in {"unknown", "none"}
