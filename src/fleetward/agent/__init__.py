"""The program on a node: holds what the controller says it should, and reports what it saw.

Owns the node's side of pairing, sync, running and handing in. Refuses to know the database and to
decide what is verified.
"""
