"""Simulated federations: local training, the experiment loop, its records and their resumption."""
