"""The paper's tables and figures as data (``files/*.toml``), and what runs and shows them."""

from deltafl.tasks import import_tasks

# The tasks on data that are published nowhere, here and in worker processes.
import_tasks("reproduction.data")
import_tasks("reproduction.roles")
