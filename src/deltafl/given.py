"""Objects of this process that settings name: classes of samplers, and tasks of ``deltafl.compare``.

Processes that play runs receive them by cloudpickle, which carries what a script or a notebook defines.
"""

from typing import Any

#: Classes by the name of their labels, and tasks by the name in settings.
SAMPLERS: dict[str, Any] = {}
TASKS: dict[str, Any] = {}


def names_in(settings: dict[str, Any]) -> list[str]:
    """The objects of this process that recorded settings name: only this process can go on with them."""
    labels = settings.get("samplers") or [settings.get("sampler", "")]
    classes = dict.fromkeys(str(label).partition("@")[0].partition("(")[0] for label in labels)
    return [name for name in classes if name in SAMPLERS] + [name for name in [settings.get("task")] if name in TASKS]
