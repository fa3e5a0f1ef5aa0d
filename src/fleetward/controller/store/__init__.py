"""The only code that speaks SQL: one module per noun, the migrations, and how a transaction runs.

Owns statements, the types of their rows, and what a violated constraint means. Refuses to decide policy;
its noun modules neither open a transaction nor end one.
"""
