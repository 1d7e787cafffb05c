"""What keeps a million clients cheap: sum trees, persistent arrays, rows in files, the memory
budget.
"""
