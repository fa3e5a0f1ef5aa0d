"""Tools of this repository: the steps of `make check`, the reference pages, the guard killer.

Owns how the repository is checked and described. Refuses to be imported by what it checks.
"""
