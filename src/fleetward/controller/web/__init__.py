"""Pages: HTML over the same services that the API calls.

Owns templates and how things are shown to a person in a browser. Refuses to know SQL and policy.
"""
