"""HTTP in, problem out: routes, authentication, streams, held calls.

Owns how a request becomes one call of a service and how its answer or its error travels back. Refuses
to know SQL and policy.
"""
