"""What the pictures have in common: sizes, colours, and one look for each sampler."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Dots an inch, and the width of a figure in inches.
DPI, WIDTH = 150, 7.2
INK, GREY, PALE = "#222222", "#767676", "#E8E8E8"
#: Matplotlib settings of every picture, on top of its defaults.
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.0,
    "text.color": INK,
    "xtick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.color": GREY,
    "ytick.labelcolor": INK,
}
# Okabe and Ito (2008) without its yellow, which is too pale on white; the baseline is black. Above six others the
# colours begin again with another dash.
_BASELINE_COLOUR = "#000000"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


class Look(NamedTuple):
    """How a sampler is drawn in every picture."""

    colour: str
    dash: str | tuple[float, tuple[float, ...]]
    zorder: float


def looks(labels: Sequence[str], baseline: str | None) -> dict[str, Look]:
    """A look for each label; the baseline is black and drawn above the others."""
    others = [label for label in labels if label != baseline]
    chosen = {
        label: Look(_COLOURS[i % len(_COLOURS)], _DASHES[(i // len(_COLOURS)) % len(_DASHES)], 2.0)
        for i, label in enumerate(others)
    }
    return chosen if baseline is None else {baseline: Look(_BASELINE_COLOUR, "-", 2.5), **chosen}


@contextmanager
def styled(changes: Mapping[Any, Any] = MappingProxyType({})) -> Iterator[None]:
    """Matplotlib's defaults with ``STYLE`` and the given changes of it, whatever the user's own settings are."""
    require("matplotlib", "plot")
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update({**STYLE, **changes})
        yield


def png_of(figure: "Figure") -> bytes:
    """The figure; without the version of Matplotlib in the file, so that a rebuild elsewhere differs in pixels only."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
