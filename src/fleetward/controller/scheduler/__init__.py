"""Who gets what: a snapshot of fleet and queue and a `now` go in, a plan comes out.

Owns fitness, order and fairness. Refuses to know the database: whether a plan may still happen is decided
by the guards of the statement that applies it.
"""
