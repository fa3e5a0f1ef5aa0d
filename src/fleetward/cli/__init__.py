"""Program 3: what a person types.

Owns flags, words on the terminal and exit statuses. Refuses to know how the other two programs work:
it starts them as processes and asks the controller over the wire.
"""
