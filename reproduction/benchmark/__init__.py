"""The benchmark: every method with its own learning rate against full participation; this
project's own question.
"""
