"""demo stub"""

import typer


def demo(ctx: typer.Context) -> None:
    """A throw-away fleet that shows the point in a minute: three nodes, one of which lies."""
