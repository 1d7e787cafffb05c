"""See ``reproduction.page``."""

from ..page import Finding, write_verdict

__all__ = ["Finding", "write_verdict"]
