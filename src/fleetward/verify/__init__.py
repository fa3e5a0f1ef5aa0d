"""Whether bytes are what they claim, the same on both ends.

Owns digests, path rules, the judgement of an attempt's artifacts, checksum lists and hash-tree proofs.
Refuses to know files, sockets, clocks and the database: bytes and numbers come in, values go out.
"""
