"""Who was ever admitted to a federation, in order. A client's index in the population is its place here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import DeltaflError

LARGEST_SIZE = 2**40


class Said(NamedTuple):
    """What a client says of itself.

    Attributes:
        num_examples: Its number of examples, from 1 to 2^40.
        known: What else is known of it beforehand, such as its shares of labels; empty for nothing.
    """

    num_examples: int
    known: tuple[float, ...] = ()


@dataclass(frozen=True)
class Roster:
    """Clients by key, a text that outlives connections and restarts.

    Attributes:
        keys: Their keys.
        said: What each says of itself.
    """

    keys: tuple[str, ...] = ()
    said: tuple[Said, ...] = ()

    @cached_property
    def place(self) -> dict[str, int]:
        """Key -> place."""
        return {key: place for place, key in enumerate(self.keys)}

    @property
    def sizes(self) -> list[int]:
        """Numbers of examples."""
        return [said.num_examples for said in self.said]

    @property
    def known(self) -> list[tuple[float, ...]]:
        """What else is known of them."""
        return [said.known for said in self.said]

    def told(self, said: Mapping[str, Said]) -> "Roster":
        """With newcomers last, and what the others say now; itself if there is no news.

        Raises:
            DeltaflError: If a size is not a number from 1 to 2^40.
        """
        news = {key: now for key, now in said.items() if key not in self.place or self.said[self.place[key]] != now}
        for key, (size, _) in news.items():
            if not 1 <= size <= LARGEST_SIZE:
                raise DeltaflError(f"client {key!r} has {size!r} examples; it must be a whole number from 1 to 2^40")
        if not news:
            return self
        # Sorted, for nodes connect in any order: partition 10 comes after partition 9.
        new_keys = sorted((key for key in news if key not in self.place), key=lambda key: (len(key), key))
        now = [news.get(key, said) for key, said in zip(self.keys, self.said, strict=True)]
        return Roster((*self.keys, *new_keys), (*now, *(news[key] for key in new_keys)))

    def without(self, keys: Collection[str]) -> "Roster":
        """Without some clients; itself if none of them is there."""
        kept = [place for place, key in enumerate(self.keys) if key not in keys]
        if len(kept) == len(self.keys):
            return self
        return Roster(tuple(self.keys[place] for place in kept), tuple(self.said[place] for place in kept))
