"""Tables as pandas data frames: CSV files with a header, Parquet, NPZ, and data frames
themselves.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import DeltaflError, in_one_line, require
from .files import read_arrays

if TYPE_CHECKING:
    import pandas as pd

TABLE_SUFFIXES = (".csv", ".npz", ".parquet")


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
    import pandas as pd

    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise DeltaflError(
            f"{path.name} is no table that can be read; give one of {', '.join(TABLE_SUFFIXES)}"
        )
    if not path.is_file():
        raise DeltaflError(f"there is no table {path}")
    arrays = read_arrays(path) if suffix == ".npz" else {}
    if suffix == ".parquet":
        require("pyarrow", "data")
    try:
        if suffix == ".parquet":
            return pd.read_parquet(path)
        if suffix == ".csv":
            options: dict[str, Any] = {"encoding": "utf-8-sig", "index_col": False}
            table = pd.read_csv(path, **options)
            # pandas renames the second of two equal columns.
            header = pd.read_csv(
                path, header=None, nrows=1, dtype=str, keep_default_na=False, **options
            ).loc[0]
            if header.duplicated().any():
                return table.set_axis(header, axis=1)
            _check_header(path.name, header.tolist())
            return table
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, array in arrays.items():
            names = (
                [name]
                if array.ndim == 1
                else [f"{name}[{k}]" for k in range(int(np.prod(array.shape[1:])))]
            )
            columns |= zip(names, array.reshape(len(array), -1).T, strict=True)
        return pd.DataFrame(columns)
    except DeltaflError:
        raise
    except (
        ValueError,
        TypeError,
        OSError,
        NotImplementedError,
    ) as error:  # pyarrow's errors are of these kinds, too
        raise DeltaflError(
            f"{path.name} cannot be read as a table: {in_one_line(error)}"
        ) from error


def _check_header(name: str, columns: list[str]) -> None:
    """Refuse a CSV file whose columns are not separated by commas, or one of whose columns has
    no name.
    """
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t"):
        raise DeltaflError(f"{name} has one column, {columns[0]!r}: separate columns by commas")
    if "" in columns:
        raise DeltaflError(
            f"{name}: column {columns.index('') + 1} has no name; if it is the index of a data "
            "frame, leave it out by "
            "to_csv(..., index=False), else name it"
        )
