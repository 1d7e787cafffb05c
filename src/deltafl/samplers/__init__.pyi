# The names of the package: see ``deltafl/_lazy.py``.

from .base import RunFacts as RunFacts
from .base import Sampler as Sampler
from .label import Label as Label
from .label import base_name as base_name
from .label import bias_of as bias_of
from .label import file_name as file_name
from .label import is_unbiased as is_unbiased
from .label import label_of as label_of
from .label import make_sampler as make_sampler
from .label import parse_label as parse_label
from .label import split_labels as split_labels
from .label import uses_aux as uses_aux
from .table import NEEDS as NEEDS
from .table import SAMPLERS as SAMPLERS
from .table import SamplerEntry as SamplerEntry
from .table import find_sampler as find_sampler
