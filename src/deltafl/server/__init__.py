"""What the server does with a round, in parts; ``part.py`` says what a part is, ``table.py`` has a
row for each.
"""
