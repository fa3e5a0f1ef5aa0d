"""The reference pages, one module each: `text()` gives the page's Markdown.

Owns how a part of the program is written down for a reader. Refuses to say anything that the program
itself does not hold.
"""
