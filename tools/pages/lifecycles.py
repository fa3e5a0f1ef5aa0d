"""The page of lifecycles: each machine as a picture and as a table.

Owns how a machine is drawn. Refuses to know who may make a move.
"""

from enum import StrEnum
from typing import Any

from fleetward.domain.lifecycle import LIFECYCLES, Lifecycle
from tools.pages.markdown import code, mono, page, table


def text() -> str:
    """Write the page."""
    return page(
        "Lifecycles",
        "`src/fleetward/domain/lifecycle.py`",
        "Each machine is written once. The database holds a copy of these moves in `lifecycle_edges` and refuses "
        "every other one with SQLSTATE `FW001`; a test tries every pair of states and every subset of the columns.",
        *(_machine(machine) for machine in LIFECYCLES),
    )


def _machine(machine: Lifecycle[Any]) -> str:
    edges = sorted(machine.edges, key=lambda edge: (_place(machine, edge.start), edge.event))
    drawn = [f"    [*] --> {machine.start}"]
    drawn += [f"    {edge.start} --> {edge.end}: {edge.event}" for edge in edges]
    drawn += [f"    {state} --> [*]" for state in machine.states if state in machine.final]
    moves = [(mono(edge.start), mono(edge.event), mono(edge.end)) for edge in edges]
    holds = [
        (mono(column), ", ".join(mono(state) for state in machine.states if state in states))
        for column, states in machine.may_hold.items()
    ]
    parts = [
        f"## {machine.table}.{machine.column}",
        code("stateDiagram-v2\n" + "\n".join(drawn), "mermaid"),
        table(["from", "event", "to"], moves),
        table(["column", "may be set when"], holds) if holds else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _place(machine: Lifecycle[Any], state: StrEnum) -> int:
    return machine.states.index(state)
