"""What is true: the words, states and rules of Fleetward, as values and pure functions.

Owns ids, states and their moves, budgets, scopes and errors. Refuses to know a clock, a file, a socket,
the environment and the database: whatever it needs comes in as an argument.
"""
