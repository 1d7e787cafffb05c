"""Proofs on the spot: is a sampler unbiased, and how small can one round's error be?"""
