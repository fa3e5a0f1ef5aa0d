"""Use cases: each function is one transaction, or load, decide, apply.

Owns the order of locks, the moment at which `now` is read, and which policy is asked. Refuses to know the
driver and the web, and to call the network while a transaction is open.
"""
