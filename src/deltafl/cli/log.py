"""The library's log on the command line: each message once, on stderr, as one line."""

import logging

import typer


class _ToldOnce(logging.Handler):
    """Writes through ``typer.echo``, so that a progress bar in the way is moved aside."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._told:
            self._told.add(text)
            typer.echo(f"deltafl: {text}", err=True)


def show_log() -> None:
    """Show what the library logs, from notes such as the choice of a slower path upwards."""
    logger = logging.getLogger("deltafl")
    logger.setLevel(logging.INFO)
    logger.addHandler(_ToldOnce())
    logger.propagate = False
