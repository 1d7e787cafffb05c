"""Tables as pandas data frames: CSV with a header, Parquet, NPZ, and data frames themselves."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ..errors import DeltaflError, in_one_line, require
from .files import read_arrays

if TYPE_CHECKING:
    import pandas as pd


def read_frame(table: "str | Path | pd.DataFrame") -> "tuple[str, pd.DataFrame]":
    """A table and its name, which is also in its index, and is that of the file; columns have
    texts as names.
    """
    require("pandas", "sim")
    import pandas as pd

    if not isinstance(table, str | os.PathLike | pd.DataFrame):
        kind = type(table).__name__
        raise DeltaflError(
            f"the table is of type {kind}; give a file or a pandas data frame, as pandas.DataFrame "
            "makes"
        )
    name = "data frame" if isinstance(table, pd.DataFrame) else Path(table).name
    frame = table if isinstance(table, pd.DataFrame) else _read_file(Path(table))
    frame = frame.set_axis(frame.columns.map(str), axis=1).reset_index(drop=True).infer_objects()
    if frame.columns.has_duplicates:  # else a label would become a feature
        raise DeltaflError(
            f"{name}: column {frame.columns[frame.columns.duplicated()][0]!r} is named twice"
        )
    return name, pd.concat([frame], keys=[name])


def _read_file(path: Path) -> "pd.DataFrame":
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise DeltaflError(
            f"{path.name} is no table that can be read; give one of {', '.join(TABLE_SUFFIXES)}"
        )
    if not path.is_file():
        raise DeltaflError(f"there is no table {path}")
    try:
        return _READERS[suffix](path)
    except DeltaflError:
        raise
    # pyarrow's errors are of these kinds, too.
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        raise DeltaflError(
            f"{path.name} cannot be read as a table: {in_one_line(error)}"
        ) from error


def _read_csv(path: Path) -> "pd.DataFrame":
    import pandas as pd

    options: dict[str, Any] = {"encoding": "utf-8-sig", "index_col": False}
    table = pd.read_csv(path, **options)
    # pandas renames the second of two equal columns, so the header is read once more, as it is.
    names = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False, **options)
    header = names.loc[0]
    if header.duplicated().any():
        return table.set_axis(header, axis=1)
    _check_header(path.name, header.tolist())
    return table


def _read_parquet(path: Path) -> "pd.DataFrame":
    require("pyarrow", "data")
    import pandas as pd

    return pd.read_parquet(path)


def _read_npz(path: Path) -> "pd.DataFrame":
    """Every array is a column (N,), or several (N, k), which are called NAME[0], NAME[1], ..."""
    import pandas as pd

    columns: dict[str, npt.NDArray[Any]] = {}
    for name, array in read_arrays(path).items():
        if array.ndim == 1:
            columns[name] = array
            continue
        for k, column in enumerate(array.reshape(len(array), -1).T):
            columns[f"{name}[{k}]"] = column
    return pd.DataFrame(columns)


def _check_header(name: str, columns: list[str]) -> None:
    """Refuse a CSV file without commas between its columns, or with a column without a name."""
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t"):
        raise DeltaflError(f"{name} has one column, {columns[0]!r}: separate columns by commas")
    if "" in columns:
        raise DeltaflError(
            f"{name}: column {columns.index('') + 1} has no name; if it is the index of a data "
            "frame, leave it out by to_csv(..., index=False), else name it"
        )


_READERS: dict[str, "Callable[[Path], pd.DataFrame]"] = {
    ".csv": _read_csv,
    ".npz": _read_npz,
    ".parquet": _read_parquet,
}
TABLE_SUFFIXES = tuple(_READERS)
