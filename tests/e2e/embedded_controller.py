"""A controller reduced to its database, for tests to kill: starts it, says where, stops at the end of its input."""

import json
import os
import sys
from pathlib import Path

from fleetward.controller.embedded import EmbeddedPostgres
from fleetward.domain.errors import Fault, Refusal


def main(home: str) -> int:
    """Run until stdin ends; one line of JSON says how the start went."""
    server = EmbeddedPostgres(Path(home))
    try:
        url = server.start()
    except (Refusal, Fault) as error:
        print(json.dumps({"code": error.code, "message": error.message, "hint": error.hint}), flush=True)
        return 3
    print(
        json.dumps({"url": url, "server": server.pid, "controller": os.getpid(), "home": str(server.home)}), flush=True
    )
    sys.stdin.buffer.read()
    server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
