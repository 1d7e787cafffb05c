"""The row of the table of tasks in ``specs.py``. It imports no PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from .base import Augment


@dataclass(frozen=True)
class TaskSpec:
    """A task's name and default settings.

    Attributes:
        name: The name on the command line.
        summary: One line for people.
        needs: What must be there: names of packages, ``"files"`` for data that ``deltafl data
            fetch`` gets, ``"archive"`` for a file that you bring: see ``sources.ARCHIVES`` and ``sources.FORMS``.
        num_clients: Population m.
        sample_size: Clients asked a round, n.
        rounds: Communication rounds T.
        local_lr: Local learning rate.
        make_model: Makes the model; can be pickled.
        local_epochs: Passes over the client's data, or None if ``local_steps`` is set.
        local_steps: Minibatch steps, or None if ``local_epochs`` is set.
        batch_size: Examples a minibatch; None for all.
        partition: Who holds what; None where the clients belong to the task.
        alpha: Concentration of a Dirichlet partition.
        metric: What is evaluated on the test set; see ``Task.metric``.
        threshold: Value of the metric that a comparison counts the rounds to; None where there is no
            customary one.
        input_scale: Factor from stored bytes to inputs.
        dataset: Name of the data set for ``load_dataset``; None if it is the task's own.
        augment: Random variation of the inputs in local training; can be pickled. None for none.
        all_owners: Whether the clients are all owners that the user's files name, however many; ``num_clients`` is then
            an example.
        tokens: Whether inputs are whole numbers; see ``Task.tokens``.
    """

    name: str
    summary: str
    needs: tuple[str, ...]
    num_clients: int
    sample_size: int
    rounds: int
    local_lr: float
    make_model: "Callable[[], torch.nn.Module]"
    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int | None = 32
    partition: str | None = None
    alpha: float = 0.5
    metric: Literal["accuracy", "loss"] = "accuracy"
    threshold: float | None = None
    input_scale: float = 1 / 255
    dataset: str | None = None
    augment: "Augment | None" = None
    all_owners: bool = False
    tokens: bool = False
