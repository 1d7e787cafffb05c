"""See ``reproduction.page``."""

from collections.abc import Sequence

from deltafl.simulation.record import RunRecord

from .. import page


def hardware(records: Sequence[RunRecord]) -> list[str]:
    """Hardware and versions, all distinct ones with the number of runs on each."""
    return ["Hardware and versions:", page.hardware([record.run() for record in records])]
