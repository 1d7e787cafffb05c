"""The samplers by name: one file per method; ``base.py`` has the base class, ``table.py`` the
names.
"""

from .base import RunFacts, Sampler
from .label import (
    Label,
    base_name,
    bias_of,
    file_name,
    is_unbiased,
    label_of,
    make_sampler,
    parse_label,
    split_labels,
    uses_aux,
)
from .table import NEEDS, SAMPLERS, SamplerEntry, find_sampler

__all__ = [
    "NEEDS",
    "SAMPLERS",
    "Label",
    "RunFacts",
    "Sampler",
    "SamplerEntry",
    "base_name",
    "bias_of",
    "file_name",
]
__all__ += [
    "find_sampler",
    "is_unbiased",
    "label_of",
    "make_sampler",
    "parse_label",
    "split_labels",
    "uses_aux",
]
