"""What a user wants; see ``reproduce.Request``."""

from .reproduce import Request

__all__ = ["Request"]
