"""The controller: the one program that decides. It keeps all state in PostgreSQL and bytes in a blob store.

Owns the database, the clock, the API and the loops. Refuses to run a job itself.
"""
