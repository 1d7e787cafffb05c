"""How far clients usually move the model: updates far beyond that are refused, and a lost model is
detected.

Each client has one vote, the norm of its last update as it was sent, used or not. With M the lower
median of all votes, those of this round among them, an update u_i is refused, from the first round
on, if

    norm(u_i) > max(1000 M, 10 norm(x)),   x the model

As long as one client alone has voted, M = sqrt(d).

So no single finite reply can carry the model away, and clients that are wrongly refused are used
once the others have voted as they did. Smaller lies pass: ``clip="median"`` bounds those.

``server/watch.py`` decides whether the model is lost, by the lower median over the clients of their
loss divided by the first one that they reported (at least 1), so that no single one of three
clients can pretend that it is.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median_low
from typing import NamedTuple

import numpy as np

from ..scale.numerics import inner
from ..server.norms import squared_norms
from ..server.watch import Watch
from ..types import Params, RoundInfo

#: Times the median norm and times the model's norm that an update may have.
FAR = 1000.0
WIDE = 10.0


class ClientScale(NamedTuple):
    """What is known of a client: the norm of its last update, and the first loss that it
    reported; 0 if none is.
    """

    norm: float = 0.0
    loss: float = 0.0


class Scales:
    """The scales of all clients by key, and the watch over the model."""

    def __init__(self) -> None:
        self.known: dict[str, ClientScale] = {}
        self._watch = _new_watch()
        #: Whether nothing in the last round suggested that the model is lost.
        self.sound = True

    def too_far(
        self,
        keys: Sequence[str],
        updates: Sequence[Params | None],
        params_d: Params,
    ) -> dict[int, str]:
        """Note the norms of a round's updates, by client; why some are refused, by place."""
        norms = dict[int, float]()
        # Before the median is taken, and whether the update is used or not: each client has one
        # vote.
        for place, (key, update) in enumerate(zip(keys, updates, strict=True)):
            if update is not None and np.isfinite(update).all():  # else it is refused as it is
                norms[place] = sqrt(squared_norms(update[None])[0])
                self.known[key] = self._of(key)._replace(norm=norms[place])
        median = sqrt(len(params_d))
        votes = [scale.norm for scale in self.known.values() if scale.norm > 0]
        if len(votes) > 1:
            median = median_low(votes)
        wide_d = params_d.astype(np.float64)
        most = max(FAR * median, WIDE * sqrt(inner(wide_d, wide_d)))
        return {
            place: f"the update has norm {norm:.3g}, far beyond those of the other clients: "
            f"at most {most:.3g} is used"
            for place, norm in norms.items()
            if norm > most
        }

    def _of(self, key: str) -> ClientScale:
        return self.known.get(key, ClientScale())

    def begin_anew(self) -> None:
        """Take the next losses as the first ones."""
        self.known = {key: scale._replace(loss=0.0) for key, scale in self.known.items()}
        self._watch = _new_watch()

    def see(
        self,
        info: RoundInfo,
        losses: Mapping[str, float],
        params_d: Params,
    ) -> str | None:
        """Why the model is lost after a round with these losses, as a clause; None if it is not."""
        ratios = []
        for key, loss in losses.items():
            first = self._of(key).loss or max(abs(loss), 1.0)
            self.known[key] = self._of(key)._replace(loss=first)
            ratios.append(loss / first)
        middle = None
        if ratios:
            middle = median_low(ratios)
        symptom = self._watch.see(info, bool(np.isfinite(params_d).all()), middle)
        # The model may be sound, but a round in which all were refused does not show it.
        refused = bool(info.rejected) and not info.num_responded
        self.sound = symptom is None and self._watch.suspect is None and not refused
        if symptom is None:
            return None
        self._watch = _new_watch()
        return symptom


def _new_watch() -> Watch:
    return Watch(
        1.0,
        log_loss=True,
        metric="the clients' median loss over their first one",
    )
