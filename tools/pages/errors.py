"""The page of errors: every code that a caller may meet.

Owns how refusals and faults are listed. Refuses to know who raises them.
"""

import inspect
from collections.abc import Iterator

from fleetward.domain import errors
from fleetward.domain.errors import Fault, Refusal
from tools.pages.markdown import page, sentence, table


def classes() -> Iterator[type[Refusal | Fault]]:
    """Every error of the domain, in the order in which it is written."""
    for found in vars(errors).values():
        if inspect.isclass(found) and issubclass(found, Refusal | Fault):
            yield found


def text() -> str:
    """Write the page."""
    rows: list[tuple[str, str, str]] = []
    meanings: dict[str, list[str]] = {}
    for found in classes():
        kind = "refusal" if issubclass(found, Refusal) else "fault"
        if found.code not in meanings:
            rows.append((f"[`{found.code}`](#{found.code})", kind, str(found.status)))
        meanings.setdefault(found.code, []).append(sentence(found.__doc__))
    details = [f"## {code}\n\n" + "\n\n".join(said) for code, said in meanings.items()]
    return page(
        "Errors",
        "`src/fleetward/domain/errors.py`",
        "A problem document (`application/problem+json`) carries one of these codes as `code`, next to `detail`, "
        "which says what was refused, which thing, why and what to do next, and `hint` where there is one. Codes "
        "are permanent. A *refusal* is for the caller to act on; the command line ends with status 3. A *fault* is "
        "the world's, and the same call may succeed later; the command line ends with status 4.",
        table(["code", "kind", "HTTP"], rows),
        *details,
    )
