"""Tables as pandas data frames: CSV with a header, Parquet, NPZ, and data frames themselves."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import DeltaflError, in_one_line, require
from .files import read_arrays

#: A ``pandas.DataFrame``. pandas is optional and slow to import, so its types have names of ours.
Frame: TypeAlias = Any


def read_frame(table: Any) -> tuple[str, Frame]:
    """A table and its name, which is also in its index, and is that of the file; columns have
    texts as names.
    """
    require("pandas", "sim")
    import pandas as pd

    if isinstance(table, pd.DataFrame):
        name = "data frame"
        frame = table
    elif isinstance(table, str | os.PathLike):
        name = Path(table).name
        frame = _read_file(Path(table))
    else:
        raise DeltaflError(
            f"the table is of type {type(table).__name__}; give a file or a pandas data frame, as "
            "pandas.DataFrame makes"
        )
    # Of objects some are numbers, as after dropna() of a column that had a gap.
    frame = frame.set_axis(frame.columns.map(str), axis=1).reset_index(drop=True).infer_objects()
    if frame.columns.has_duplicates:  # else a second label would become a feature
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DeltaflError(f"{name}: column {twice!r} is named twice")
    # Errors take table and row from the index, also where two tables are joined.
    return name, pd.concat([frame], keys=[name])


def is_table_file(name: str) -> bool:
    """Whether a file's name is that of a table, whatever the case of its ending."""
    return name.lower().endswith(TABLE_SUFFIXES)


def _read_file(path: Path) -> Frame:
    if not is_table_file(path.name):
        raise DeltaflError(
            f"{path.name} is no table that can be read; give one of {', '.join(TABLE_SUFFIXES)}"
        )
    if not path.is_file():
        raise DeltaflError(f"there is no table {path}")
    read = next(read for end, read in _READERS.items() if path.name.lower().endswith(end))
    try:
        return read(path)
    except DeltaflError:
        raise
    # pyarrow's errors are of these kinds, too.
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        raise DeltaflError(
            f"{path.name} cannot be read as a table: {in_one_line(error)}"
        ) from error


def _read_csv(path: Path) -> Frame:
    import pandas as pd

    # utf-8-sig: spreadsheets begin a file with a mark, which would be part of the first name.
    # Without index_col=False a comma at the end of each row would make the first column an index.
    options: dict[str, Any] = {"encoding": "utf-8-sig", "index_col": False}
    table = pd.read_csv(path, **options)
    # pandas gives columns without a name one, and renames the second of two equal ones. So the
    # header is read once more, as it is.
    first = pd.read_csv(
        path,
        header=None,
        nrows=1,
        dtype=str,
        keep_default_na=False,
        **options,
    )
    header = first.loc[0].tolist()
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise DeltaflError(f"{path.name} has one column, {header[0]!r}: separate columns by commas")
    if "" in header:
        raise DeltaflError(
            f"{path.name}: column {header.index('') + 1} has no name; if it is the index of a data "
            "frame, leave it out by to_csv(..., index=False), else name it"
        )
    return table.set_axis(header, axis=1)


def _read_parquet(path: Path) -> Frame:
    require("pyarrow", "data")
    import pandas as pd

    return pd.read_parquet(path)


def _read_npz(path: Path) -> Frame:
    """Every array is a column (N,), or several (N, k), which are called NAME[0], NAME[1], ..."""
    import pandas as pd

    columns = {}
    for name, array in read_arrays(path).items():
        if array.ndim == 1:
            columns[name] = array
            continue
        for k, column in enumerate(array.reshape(len(array), -1).T):
            columns[f"{name}[{k}]"] = column
    return pd.DataFrame(columns)


#: The formats: how a file's name ends, and what reads it.
_READERS: dict[str, Callable[[Path], Frame]] = {
    ".csv": _read_csv,
    ".npz": _read_npz,
    ".parquet": _read_parquet,
}
TABLE_SUFFIXES = tuple(_READERS)
