"""Tables as pandas data frames: text with a header, Parquet, NPZ, and data frames themselves."""

import codecs
import os
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ...errors import DeltaflError, explained, in_one_line, require
from ...store.files import opened
from ...store.room import require_ram
from .files import read_arrays, unpacked

#: A ``pandas.DataFrame``. pandas is optional and slow to import, so its types have names of ours.
Frame: TypeAlias = Any

#: Separators that are hard to type, and a run of blanks.
_SEPARATORS = {"tab": "\t", r"\t": "\t", "space": r"\s+"}


def read_frame(
    table: Any,
    sep: str | None,
    encoding: str | None,
    texts: Collection[str],
) -> tuple[str, Frame]:
    """A table and its name, which is also in its index, and is that of the file; columns have
    texts as names.

    ``sep`` and ``encoding`` are of files of text; there the columns ``texts`` stay as they are
    written, for a number has no leading zeros.
    """
    require("pandas", "sim")
    import pandas as pd

    is_file = isinstance(table, str | os.PathLike)
    # Those of polars and Arrow, among others.
    if hasattr(table, "to_pandas"):
        with explained("the table cannot be made a pandas data frame"):
            table = table.to_pandas()
    if not (is_file or isinstance(table, pd.DataFrame)):
        raise DeltaflError(
            f"the table is of type {type(table).__name__}; give a file, a pandas data frame, "
            "or what has to_pandas()"
        )
    name = Path(table).name if is_file else "data frame"
    if (sep or encoding) and separator_of(name) is None:
        raise DeltaflError(
            f"sep and encoding are of tables of text ({', '.join(_TEXTS)}), and this one is "
            f"{name}: leave them out"
        )
    frame = table
    if is_file:
        frame = _read_file(Path(table), sep, encoding, texts)
    # Of objects some are numbers, as after dropna() of a column that had a gap.
    frame = frame.set_axis(frame.columns.map(str), axis=1).reset_index(drop=True).infer_objects()
    if frame.columns.has_duplicates:  # else a second label would become a feature
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DeltaflError(
            f"{name}: column {twice!r} is named twice; rename one of them, or drop it"
        )
    if len(frame) == 0:
        raise DeltaflError(f"{name} has no rows; give it one for each example")
    # Errors take table and row from the index, also where two tables are joined.
    return name, pd.concat([frame], keys=[name])


def is_table_file(name: str) -> bool:
    """Whether a file's name is that of a table, whatever the case of its ending."""
    return name.lower().endswith(TABLE_SUFFIXES)


def table_stem(name: str) -> str:
    """A table's name without the ending: ``visits`` of ``visits.csv.gz``."""
    stem = Path(name).name
    ending = max((end for end in TABLE_SUFFIXES if stem.lower().endswith(end)), key=len, default="")
    return stem[: len(stem) - len(ending)]


def separator_of(name: str) -> str | None:
    """What separates the columns of a table of text, by its name; None for other files."""
    plain = name.lower().removesuffix(".gz")
    return next((sep for end, sep in _TEXTS.items() if plain.endswith(end)), None)


def _read_file(
    path: Path,
    sep: str | None,
    encoding: str | None,
    texts: Collection[str],
) -> Frame:
    if not is_table_file(path.name):
        raise DeltaflError(
            f"{path.name} is no table that can be read; give one of {', '.join(TABLE_SUFFIXES)}"
        )
    if not path.is_file():
        raise DeltaflError(f"there is no table {path}")
    usual = separator_of(path.name)
    with explained(f"{path.name} cannot be read as a table"):
        if usual is not None:
            return _read_text(path, sep or usual, encoding, texts)
        return _FILES[path.suffix.lower()](path)


def _read_text(
    path: Path,
    sep: str,
    encoding: str | None,
    texts: Collection[str],
) -> Frame:
    import pandas as pd
    from pandas.errors import EmptyDataError, ParserError, ParserWarning

    # utf-8-sig: spreadsheets begin a file with a mark, which would be part of the first name.
    # Without index_col=False a comma at the end of each row would make the first column an index.
    options: dict[str, Any] = {
        "sep": _SEPARATORS.get(sep, sep),
        "encoding": encoding or "utf-8-sig",
        "index_col": False,
    }
    if len(options["sep"]) != 1 and sep != "space":
        raise DeltaflError(
            f"sep is {sep!r}; it must be one character, such as ';', or tab or space"
        )
    try:
        # pandas gives columns without a name one, and renames the second of two equal ones. So the
        # header is read by itself, as it is.
        with unpacked(path) as file:
            first = pd.read_csv(
                file,
                header=None,
                nrows=1,
                dtype=str,
                keep_default_na=False,
                **options,
            )
        header = first.loc[0].tolist()
        _check_header(path, header, encoding)
        with unpacked(path) as file, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", ParserWarning)
            # Without low_memory=False one column may have numbers in one part and texts in another.
            table = pd.read_csv(file, dtype=dict.fromkeys(texts, str), low_memory=False, **options)
    except EmptyDataError:
        raise DeltaflError(
            f"{path.name} is empty; give it a header and a row for each example"
        ) from None
    except UnicodeError:
        raise _no_text(path, encoding) from None
    except LookupError:
        raise DeltaflError(
            f"encoding is {encoding!r}, which Python does not know; write utf-8, latin-1, cp1252 "
            "or utf-16"
        ) from None
    except ParserError as error:
        raise DeltaflError(
            f"{path.name} cannot be read as a table: {in_one_line(error)}; {_AS_MANY}"
        ) from error
    # pandas would leave out the last cells of each row.
    if any(issubclass(one.category, ParserWarning) for one in said):
        raise DeltaflError(
            f"{path.name} has rows with more cells than the {len(header)} of its header: {_AS_MANY}"
        )
    return table.set_axis(header, axis=1)


def _check_header(path: Path, header: Sequence[str], encoding: str | None) -> None:
    """Refuse a header without several columns that have names."""
    if "\0" in "".join(header):
        raise _no_text(path, encoding)
    if len(header) == 1:
        marks = [mark for mark in ";\t|,: " if mark in header[0]]
        raise DeltaflError(
            f"{path.name} has one column, {header[0]!r}: begin with a line of their names, and say "
            f"what separates them, as --sep {(marks or ';')[0]!r} (sep={(marks or ';')[0]!r}) does"
        )
    if "" in header:
        raise DeltaflError(
            f"{path.name}: column {header.index('') + 1} has no name; if it is the index of a data "
            "frame, leave it out by to_csv(..., index=False), else name it"
        )


#: What a row must have.
_AS_MANY = "give each row as many cells as the header has, and put cells with separators in quotes"


def _no_text(path: Path, encoding: str | None) -> DeltaflError:
    """What a file is that is no text in this encoding."""
    with unpacked(path) as file:
        start = file.read(4096)
    probable = "latin-1"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:2]:
        probable = "utf-16"
    elif _IN_NO_TEXT.search(start):
        return DeltaflError(
            f"{path.name} is no text, but packed or of another kind; the tables that can be read "
            f"are {', '.join(TABLE_SUFFIXES)}"
        )
    return DeltaflError(
        f"{path.name} is not text in {encoding or 'UTF-8'}: write --encoding {probable} "
        f"(encoding={probable!r}) or what it was written in, or save it as UTF-8"
    )


#: What a text has in no encoding of one byte a letter.
_IN_NO_TEXT = re.compile(rb"[\0-\x08\x0e-\x1a]")


def _read_parquet(path: Path) -> Frame:
    require("pyarrow", "data")
    import pandas as pd
    from pyarrow.parquet import ParquetFile

    with opened(path, users=True) as file:
        said = ParquetFile(file).metadata
        # A column of one value takes no space in the file.
        require_ram(8 * said.num_rows * said.num_columns)
        file.seek(0)
        return pd.read_parquet(file)


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


#: Tables of text, by how a file's name ends, and what separates their columns; ``.gz`` may follow.
_TEXTS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
#: Other files, and what reads them.
_FILES: dict[str, Callable[[Path], Frame]] = {".npz": _read_npz, ".parquet": _read_parquet}
TABLE_SUFFIXES = (*_TEXTS, *(f"{end}.gz" for end in _TEXTS), *_FILES)
