"""What is said between programs.

Owns the one table of endpoints, every message, the form of a problem and which versions speak to which.
Refuses to know how a call travels, and who serves it.
"""
