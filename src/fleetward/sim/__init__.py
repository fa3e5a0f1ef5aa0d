"""A world: virtual clock, lossy network, crashing nodes and controllers, over real PostgreSQL.

Owns what happens around the real services, planner and agent session, and the checks after every step.
Refuses to copy any rule of theirs: it runs the very same functions.
"""
