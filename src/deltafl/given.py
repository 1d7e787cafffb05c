"""Objects of this process that settings name: classes of samplers, and tasks of ``deltafl.compare``.

Processes that play runs receive them by cloudpickle, which carries what a script or a notebook defines.
"""

from typing import Any

#: Classes by the name of their labels, and tasks by the name in settings.
SAMPLERS: dict[str, Any] = {}
TASKS: dict[str, Any] = {}
