"""The paper's tables and figures as data (``files/*.toml``), and what runs and shows them."""

from deltafl.tasks import import_tasks

# The tasks on data that the package does not read itself, here and in worker processes.
import_tasks("reproduction.data")
import_tasks("reproduction.movielens")
import_tasks("reproduction.roles")
