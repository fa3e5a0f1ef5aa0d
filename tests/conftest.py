"""What every test of the suite stands on.

Owns the list of plugins: what a machine may lack (`from tests.needs import needs`), and real PostgreSQL.
Refuses to hold a fixture of one area; those live in the folders of their tests.
"""

pytest_plugins = ["tests.needs", "tests.fix_database"]
