"""How fast it is, in figures that anyone can make again: `make bench`.

Owns measuring the whole system from outside, beside PostgreSQL's own speed in the same run. Refuses to
judge: a figure is to grow from, no gate. Writes nothing into the tree and leaves nothing running.
"""
