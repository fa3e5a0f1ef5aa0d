"""`python -m fleetward.agent`: the agent program, for whoever starts it as a process.

Owns the call. Refuses to know anything else.
"""

import sys

from fleetward.agent.main import main

if __name__ == "__main__":
    sys.exit(main())
