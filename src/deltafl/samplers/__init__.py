"""The samplers by name. A method is a sampler (score), a sampling design and an estimator; see ``label.py``.

One file a method; ``base.py`` has the base class, ``table.py`` the names, ``label.py`` the labels.
"""

from .base import RunFacts, Sampler
from .label import (
    Label,
    bias_of,
    file_name,
    is_unbiased,
    leaves_out,
    make_sampler,
    parse_label,
    split_labels,
    uses_aux,
)
from .table import NEEDS, SAMPLERS, SamplerEntry, find_sampler, is_own

__all__ = [
    "NEEDS",
    "SAMPLERS",
    "Label",
    "RunFacts",
    "Sampler",
    "SamplerEntry",
    "bias_of",
    "file_name",
    "find_sampler",
    "is_own",
    "is_unbiased",
    "leaves_out",
    "make_sampler",
    "parse_label",
    "split_labels",
    "uses_aux",
]
