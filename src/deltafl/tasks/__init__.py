"""Data sets, partitions and models: what is learnt, and who holds which part of it. Importing it
loads no PyTorch.
"""

from .base import Dataset, Task
from .files import FileStatus, cache_folder, cached_images, check, data_folders, fetch, read_arrays
from .images import idx_dataset
from .leaf import encode_text
from .losses import binary_cross_entropy, cross_entropy, squared_error
from .metrics import METRICS, Metric, metric_of
from .models import (
    celeba_cnn,
    crop_and_flip,
    femnist_cnn,
    mlp,
    next_token_lstm,
    resnet,
    softmax_regression,
    two_layer_cnn,
)
from .own import check_task, load_own
from .partitions import PARTITIONS, hold_out_by_owner, make_partition
from .registry import TaskSpec, find_task, import_tasks, known_tasks, make_task, register
from .tables import from_huggingface, table_task

__all__ = [
    "METRICS",
    "PARTITIONS",
    "Dataset",
    "FileStatus",
    "Metric",
    "Task",
    "TaskSpec",
    "binary_cross_entropy",
    "cache_folder",
    "cached_images",
    "celeba_cnn",
    "check",
    "check_task",
    "crop_and_flip",
    "cross_entropy",
    "data_folders",
    "encode_text",
    "femnist_cnn",
    "fetch",
    "find_task",
    "from_huggingface",
    "hold_out_by_owner",
    "idx_dataset",
    "import_tasks",
    "known_tasks",
    "load_own",
    "make_partition",
    "make_task",
    "metric_of",
    "mlp",
    "next_token_lstm",
    "read_arrays",
    "register",
    "resnet",
    "softmax_regression",
    "squared_error",
    "table_task",
    "two_layer_cnn",
]
