"""`python -m fleetward` is `fleetward`."""

from fleetward.cli.main import main

if __name__ == "__main__":
    main()
