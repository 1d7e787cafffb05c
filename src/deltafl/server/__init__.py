"""What the server does with an estimate: optimizers, the norm guard, momentum that clients
apply, the watch.
"""
