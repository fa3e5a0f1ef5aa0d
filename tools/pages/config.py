"""The page of settings.

Owns how a setting is written down. Refuses to know what any is used for.
"""

from fleetward.controller.config import FILE_NAME, SETTINGS
from tools.pages.markdown import mono, page, table


def text() -> str:
    """Write the page."""
    rows = [(mono(one.name), mono(one.flag), mono(one.env), mono(one.default), one.doc) for one in SETTINGS]
    return page(
        "Settings",
        "`src/fleetward/controller/config.py`",
        f"A setting comes from its flag, else from its environment variable, else from `{FILE_NAME}` in the home "
        "folder, else it has its default. `fleetward config show` prints each one's value and where it came from.",
        table(["name", "flag", "environment", "default", "what it is"], rows),
    )
