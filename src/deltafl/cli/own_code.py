"""Errors of the user's own code, for a person."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from ..errors import OWN_ERRORS, DeltaflError
from ..simulation.parallel.processes import failure_of
from ..tasks.own import own_code_error


@contextmanager
def own_code_explained(task: str, labels: Sequence[str]) -> Iterator[None]:
    """Turn errors of the user's own task, samplers and control variates into one sentence."""
    try:
        yield
    except (DeltaflError, typer.Exit):
        raise
    except OWN_ERRORS as error:
        # What the system refuses is explained where a command ends.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        failure = failure_of(error)
        # Sampler and control variate of a label may both be files.
        parts = [part for label in labels for part in label.split("@")]
        sentence = own_code_error([task, *parts], failure.summary, failure.places)
        if sentence is None:
            raise
        raise sentence from error
