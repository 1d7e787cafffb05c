"""How a method is drawn: one colour for each, the same in every picture and on every page.

Baselines are neutral, methods have colours: those of Okabe and Ito (2008), which people of all
kinds of colour vision tell apart, without their yellow, which is too pale on white. Variants of one
method differ in dashes and markers.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..samplers.label import base_name

INK = "#222222"
GREY = "#767676"
PALE = "#E8E8E8"
#: At most this many curves of a panel are in colour; the others have this grey.
MOST_STRONG = 6
WEAK = "#BDBDBD"
_BLUE = "#0072B2"
_RED = "#D55E00"
_GREEN = "#009E73"
_PINK = "#CC79A7"
_SKY = "#56B4E9"
_ORANGE = "#E69F00"
#: Colours on a dark ground: the same hues, lighter.
ON_DARK = {
    _BLUE: "#4C9AE6",
    _RED: "#F0793A",
    _GREEN: "#22B98A",
    _PINK: "#DD93BC",
    _SKY: "#9AD8F8",
    _ORANGE: "#F3B733",
    "#000000": "#F4F4F4",
    GREY: "#A0A0A0",
    WEAK: "#5A5A5A",
}
_COLOURS = (_BLUE, _RED, _GREEN, _PINK, _SKY, _ORANGE)
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", (0.0, (4.0, 1.5)), (0.0, (1.0, 1.2)), (0.0, (5.0, 1.2, 1.0, 1.2)))
#: Methods that are often in one picture; the colour of another follows from its name.
_FIXED = {
    "uniform": ("#000000", "o", 0),
    "fedavg": ("#000000", "D", 1),
    "full": (GREY, "s", 0),
    "census": (_BLUE, "o", 0),
    "balanced": (_ORANGE, "s", 0),
    "innovation": (_GREEN, "^", 0),
    "pracdelta": (_RED, "D", 0),
    "fedpracis": (_SKY, "v", 0),
    "cluster-is": (_PINK, "P", 0),
    "fed-cbs": (_PINK, "^", 0),
    "divfl": (_SKY, "o", 0),
    "power-of-choice": (_GREEN, "s", 0),
    "md": (_ORANGE, "v", 0),
    "delta-centred": (_ORANGE, "D", 0),
    "spread": (_SKY, "P", 0),
    "fedvarp": (_PINK, "o", 0),
    "osmd": (_BLUE, "^", 0),
}
#: A theoretical form has the colour of the practical one.
_PRACTICAL = {
    "delta": "pracdelta",
    "fedis": "fedpracis",
    "cluster-is-oracle": "cluster-is",
    "md-fixed": "md",
}


class Look(NamedTuple):
    """How a method is drawn."""

    colour: str
    dash: str | tuple[float, tuple[float, ...]]
    marker: str
    zorder: float

    @property
    def lengths(self) -> tuple[float, ...]:
        """The lengths of dashes and gaps, in widths of the line; none if it is solid."""
        return () if isinstance(self.dash, str) else self.dash[1]

    @property
    def weak(self) -> "Look":
        """The same line in pale grey, behind the others."""
        return self._replace(colour=WEAK, zorder=1.6)


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """A look for each label: colour and marker of its sampler, the same in every picture, the
    next dash a variant.
    """
    used: Counter[tuple[str, int]] = Counter()
    chosen = {}
    for label in labels:
        name = _PRACTICAL.get(base_name(label), base_name(label))
        # Not ``hash``, which is another one in every process.
        place = zlib.crc32(name.encode())
        colour, marker, dash = _FIXED.get(
            name,
            (_COLOURS[place % 6], _MARKERS[place // 6 % 6], 0),
        )
        variant = used[colour, dash]
        used[colour, dash] += 1
        marker = _MARKERS[(_MARKERS.index(marker) + variant // 4) % 6]  # there are four dashes
        zorder = 2.5 if name == "fedavg" else 2.0
        chosen[label] = Look(colour, _DASHES[(dash + variant) % 4], marker, zorder)
    return chosen
