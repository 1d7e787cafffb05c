"""Columns of a table as numbers: classes and owners as 0, 1, ..., inputs, and what to predict.

A column is a ``pandas.Series`` whose index holds the table and the row, so that an error can name
the first cell that is of no use, and says what to write instead.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import chain, islice
from reprlib import repr as shown
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from ...errors import DeltaflError, printable, require_no_twins
from ...types import Array, BoolArray, FloatArray, IntArray
from .frames import Frame

#: A ``pandas.Series``.
Column: TypeAlias = Any

#: Products of larger numbers do not fit into float32; measurements are smaller, stand-ins for
#: missing ones often larger.
LARGEST = 1e18

TaskType = Literal["classification", "regression"]

#: A label of more different numbers than this may be a class or a target: ``task_type`` has to say
#: which.
MOST_CLASSES = 20


class Coded(NamedTuple):
    """A column of classes or owners as 0, 1, ..., and the names of these."""

    code: IntArray
    names: Sequence[str]


class Target(NamedTuple):
    """Classes 0, 1, ... or labels (N, labels) and their number, or float32 targets and 0; ``unit``,
    how targets were scaled, follows the name of the data.
    """

    y: Array
    num_classes: int
    unit: str = ""
    names: Sequence[str] = ()


def target_of(values: Column, task_type: TaskType | None, standardize: bool) -> Target:
    """What is to be predicted, of a column of labels."""
    where = _named(values)
    if task_type not in (None, *get_args(TaskType)):
        raise DeltaflError(
            f"task_type is {task_type!r}; it must be {' or '.join(map(repr, get_args(TaskType)))}"
        )
    if (task_type or _task_type(where, values)) == "classification":
        _require_whole(values)
        y, names = codes(values)
        # PyTorch's mark of no label, which would be a class beside 0, 1, ...
        if names == ["-100", *map(str, range(len(names) - 1))]:
            cure = "drop the row, or write words for classes if -100 is one"
            require_all(values, y > 0, "a label, and -100 marks that there is none", cure)
        if y.min() == y.max():
            raise DeltaflError(f"{where} holds a single class; two are needed")
        return Target(y, len(names), names=names)
    number = _numbers(values)
    scale = float(number.std())
    # Division by the deviation would give NaN.
    if number.min() == number.max() or scale == 0:
        raise DeltaflError(f"{where} holds a single number; there is nothing to predict")
    if not standardize:
        return Target(number.astype(np.float32), 0)
    mean = float(number.mean())
    name = printable(repr(values.name), limit=60)
    unit = f", {name} standardized by mean {mean:.4g} and standard deviation {scale:.4g}"
    return Target(((number - mean) / scale).astype(np.float32), 0, unit)


def targets_of(frame: Frame, task_type: TaskType | None, standardize: bool) -> Target:
    """What is to be predicted, of several columns: labels of 0 and 1, or numbers."""
    y = np.column_stack([_numbers(frame[name]) for name in frame])
    names = list(frame)
    if task_type != "regression":
        is_label = np.isin(y, (0, 1)).all(axis=0)
        if not is_label.all():
            raise DeltaflError(
                f"{frame.index[0][0]}: column {names[is_label.argmin()]!r} holds other numbers "
                "than 0 and 1; several labels are 0 or 1 each, as pandas.get_dummies makes them; "
                "for several numbers to predict write task_type = regression (--task-type "
                "regression)"
            )
        return Target(y.astype(np.float32), len(names), names=names)
    each = [target_of(frame[name], task_type, standardize) for name in names]
    unit = "".join(one.unit for one in each)
    return Target(np.column_stack([one.y for one in each]), 0, unit)


def _task_type(where: str, values: Column) -> TaskType:
    """What a label is, where that is clear: words and few whole numbers are classes."""
    number = _parsed(values)
    known = number.dropna().to_numpy(np.float64)
    has_words = len(known) < values.notna().sum()
    if values.dtype.name == "category":
        return "classification"
    if not (has_words or np.isfinite(known).all()):
        _numbers(values)
    if has_words:
        words = values.dropna().astype(str).str.strip()
        # Else each date or price would become a class.
        if words.str.fullmatch(f"{_DATE}|{_PUNCTUATED}|[\\d.]+", flags=re.ASCII).all():
            _numbers(values)
        return "classification"
    is_whole = known % 1 == 0
    if number.nunique() <= MOST_CLASSES and is_whole.all():
        return "classification"
    # ``argmin`` of a mask: the first that is no whole number, or the first of all.
    raise DeltaflError(
        f"{where} holds {number.nunique()} different numbers such as {known[is_whole.argmin()]:g}: "
        "write task_type = regression (--task-type regression) to predict the number; up to "
        f"{MOST_CLASSES} whole numbers, or words, are classes, and more are with task_type = "
        "classification"
    )


def _require_whole(values: Column) -> None:
    """Refuse classes that are numbers, also as texts, unless all of them are whole."""
    number_e = _parsed(values).to_numpy(np.float64, na_value=np.nan)
    if values.dtype.name == "category" or np.isnan(number_e).any():
        return
    if np.isinf(number_e).any():
        _numbers(values)
    require_all(
        values,
        number_e % 1 == 0,
        "a whole number or a word",
        "write task_type = regression (--task-type regression) to predict the number, or words for "
        "classes",
    )


def codes(values: Column) -> Coded:
    """Whole numbers, or words, as 0, 1, ... in sorted order; categories in their own, also those
    that no row has.

    Texts stay as they are but for blanks around them: "7", "07" and "+7" are three.
    """
    if values.dtype.name == "category":
        require_all(values, values.notna().to_numpy(), "a category", "")
        require_no_twins(_named(values), values.cat.categories)
        names = [str(x) for x in values.cat.categories]
        return Coded(values.cat.codes.to_numpy(np.int64), names)
    is_number = values.dtype.kind in "biuf"
    if is_number:
        number_e = values.to_numpy(np.float64, na_value=np.nan)
        good_e = number_e == np.trunc(number_e)
    else:
        good_e = np.array([isinstance(value, str | int | np.integer) for value in values])
        words = values.astype(str).str.strip()
        good_e &= (words != "").to_numpy()
    cure = "correct it (astype(str) makes words of dates), or drop the row"
    if any(hasattr(value, "__len__") and not isinstance(value, str | bytes) for value in values):
        cure = (
            "of several labels take a column each (label=['a', 'b']), of one-hot labels the place "
            "of the 1"
        )
    require_all(values, good_e, "a whole number or a word", cure)
    if values.dtype.kind == "f":
        largest = 2 / np.finfo(values.to_numpy().dtype).eps
        needed = f"at most {largest:.0f}, for of larger floating-point numbers some are missing"
        cure = "read the column as whole numbers or as text"
        require_all(values, np.abs(number_e) <= largest, needed, cure)
    if is_number:
        code, numbers = values.factorize(sort=True)
        kind = bool if values.dtype.kind == "b" else int
        return Coded(code.astype(np.int64), [str(kind(number)) for number in numbers])
    stripped = (value.strip() if isinstance(value, str) else value for value in values)
    require_no_twins(_named(values), stripped)
    code, different = words.factorize()
    names = different.tolist()
    order = sorted(range(len(names)), key=names.__getitem__)
    # As numbers, so that 9 comes before 10, and exactly, for ids exceed what float64 tells apart.
    if all(_PLAIN.fullmatch(name) for name in names):
        order.sort(key=lambda k: Decimal(names[k]))
    return Coded(np.argsort(order)[code].astype(np.int64), [names[k] for k in order])


def by_name(values: Column, names_of: Mapping[str, Sequence[str]]) -> Column:
    """A column of which each part numbers the classes in its own way, as one of all their names: a
    categorical, with the names of the first part first.

    ``names_of`` has the names of the classes 0, 1, ... of each part, by what the index calls it;
    none of a part that holds words, or the numbers that all others mean alike.
    """
    import pandas as pd

    lists = list(dict.fromkeys(tuple(names) for names in names_of.values() if names))
    if not lists:
        return values
    alike = lists[0] if len(lists) == 1 else ()
    place = {name: k for k, name in enumerate(dict.fromkeys(chain.from_iterable(lists)))}
    require_all(
        values,
        (values != -1).to_numpy(),
        "a class",
        "-1 is an example without one: drop the row",
    )
    codes: list[int] = []
    for source, cell in zip(values.index.get_level_values(0), values.tolist(), strict=True):
        names = names_of[source] or alike
        name = cell
        if cell in range(len(names)):
            name = names[int(cell)]
        codes.append(place.get(name, -1) if isinstance(name, str) else -1)
    some = ", ".join(map(repr, islice(place, 3)))
    require_all(
        values,
        np.array(codes) >= 0,
        f"one of {len(place)} names, such as {some}, or the number of one",
        "give this part the names of its classes, as the others have, or drop the row",
    )
    return pd.Series(pd.Categorical.from_codes(codes, list(place)), values.index, name=values.name)


def _named(values: Column) -> str:
    """What errors call a column."""
    return f"{values.index[0][0]}: column {values.name!r}"


#: A number as text, not larger than ids are.
_PLAIN = re.compile(r"[+-]?\d{1,100}(\.\d{1,100})?", re.ASCII)


def features_of(frame: Frame) -> FloatArray:
    """The columns as numbers, float64 (N, k)."""
    if all(kind.kind in "biuf" for kind in frame.dtypes):
        # Of ten thousand columns at once; in this order, for bits of means depend on it.
        x: FloatArray = np.ascontiguousarray(frame.to_numpy(np.float64, na_value=np.nan))
        if (np.abs(x) <= LARGEST).all():
            return x
    return np.column_stack([_numbers(frame[name]) for name in frame])


def standardized(x: FloatArray, test_e: BoolArray) -> FloatArray:
    """Features with mean 0 and deviation 1 over the training rows; test rows say nothing about the
    scale, for a model is judged on rows that it has not seen.
    """
    train = x[~test_e]
    deviation = train.std(axis=0)
    # Of equal numbers the deviation is not always 0, for their mean is rounded; of the smallest
    # that there are it may be, for squares are rounded, too.
    varies = (train.min(axis=0) < train.max(axis=0)) & (deviation > 0)
    scaled: FloatArray = (x - train.mean(axis=0)) / np.where(varies, deviation, 1.0)
    return scaled


_DATE = r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?"
_MONTH = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DATE_IN_WORDS = rf"\d{{4}}-\d{{2}}|(\d{{1,4}}\W*)?{_MONTH}\W*\d{{1,4}}(\W.*)?"
#: Between thousands, or before decimals; blanks that do not break a line are among them.
_MARK = "[,'\u2019 \u00a0\u202f]"
_PUNCTUATED = rf"[+-]?\d[\d.]*{_MARK}(\d|\.|{_MARK})*|[+-]?\d+(\.\d{{3}}){{2,}}"
#: What a cell that is no usable number looks like, and the cure.
_CURES = {
    r"[+-]?inf(inity)?": "replace infinity by a number, or drop the row",
    r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?": "divide the column or take its logarithm; if the "
    "number stands for a missing value, fill that in or drop the row",
    rf"{_DATE}|{_DATE_IN_WORDS}": "make dates numbers of days, as "
    "(pandas.to_datetime(table[{name!r}].astype(str), utc=True) - pandas.Timestamp('2000-01-01', "
    "tz='UTC')).dt.days does, or drop the column",
    r"-?\d+ days?.*|\d{1,3}:\d\d(:\d\d(\.\d+)?)?": "make times numbers of seconds, as "
    "pandas.to_timedelta(table[{name!r}].astype(str)).dt.total_seconds() does for hh:mm:ss, or "
    "drop the column",
    r"[<>~\u2264\u2265]=?\s*[\d.,]+": "write a number for a limit, such as half of it, or drop the "
    "column",
    _PUNCTUATED: "leave out separators of thousands and write a decimal point: give the data frame "
    "that pandas.read_csv(file, decimal=',', thousands='.') reads",
    r"\W+|n\.?/?a\.?|unknown|missing": "if it stands for a missing value, fill that in or drop the "
    "row",
    r"\[.*\]|\(.*,.*\)": "an example has one number there: make a column of each, and of one-hot "
    "labels one of the places of the 1",
    r"[$€£]\s*[\d.,]+|[\d.,]+\s*[%€$£°]\w*": "leave out the unit, as "
    "table[{name!r}].str.strip('$€£%°C ').astype(float) does",
    r"(?-i:\([^,]*j\)|[\d.]+j)": "make columns of the real and of the imaginary part, as "
    "numpy.real(table[{name!r}]) and numpy.imag(table[{name!r}]) do",
    r".*": "encode words first, as pandas.get_dummies(table, columns=[{name!r}]) does, or drop the "
    "column",
}


def _numbers(values: Column) -> FloatArray:
    number: FloatArray = _parsed(values).to_numpy(np.float64, na_value=np.nan)
    good_e = np.abs(number) <= LARGEST
    if not good_e.all():
        cell = str(values.iloc[int(good_e.argmin())]).strip()
        cure = next(
            cure
            for form, cure in _CURES.items()
            if re.fullmatch(form, cell, re.IGNORECASE | re.DOTALL)
        )
        needed = f"a number between {-LARGEST:g} and {LARGEST:g}"
        require_all(values, good_e, needed, cure.format(name=values.name))
    return number


def _parsed(values: Column) -> Column:
    """The values as numbers, with NaN for what is none."""
    import pandas as pd

    if values.dtype.kind not in "biuf":
        # As text, for pandas takes dates and complex numbers for numbers.
        values = values.astype(str).str.strip().replace({"True": "1", "False": "0"})
    return pd.to_numeric(values, errors="coerce")


def require_all(values: Column, good_e: BoolArray, needed: str, cure: str) -> None:
    """Refuse the first value that is not good; the index holds table and row."""
    known_e = values.notna().to_numpy()
    # Missing values first, which have a cure of their own.
    if not known_e.all():
        good_e = known_e
        cure = (
            "a missing value (in CSV files an empty cell, NA, None, null, ...): fill it in, drop "
            "the row, or, where such a word is meant, write another one"
        )
    if good_e.all():
        return
    bad = int(good_e.argmin())
    source, row = values.index[bad]
    raise DeltaflError(
        f"{source}: row {row + 1}, column {values.name!r} holds {shown(values.tolist()[bad])}; it "
        f"must be {needed}; {cure}"
    )
