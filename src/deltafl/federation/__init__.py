"""Federations of clients who come, go, fail and lie: what the hosts of real federations share.

A host such as ``deltafl.flower`` brings messages; rules, rounds and saved states are here.
"""
