"""Tables, plots and the HTML report, made from records and from nothing else.

``summary`` holds the arithmetic and the sentences, so that the terminal, the page and ``--json`` say the same.
"""
