"""The report: one HTML file that shows a comparison, opens from a disk and asks the network for
nothing. Needs Bokeh, which brings Jinja2.

``report.html`` is the template: the page, its style, and the script that switches samplers, axes
and colours. Here is what it shows. Numbers are those of the ``Summary``: none is computed twice.
"""

import gzip
import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import printable, require
from ..samplers.label import base_name, bias_of
from ..samplers.table import SAMPLERS, SHORT_NEEDS
from ..store.files import write_with_folder
from ..types import Array, judge_of
from .bands import (
    Band,
    client_values,
    clients_of,
    curve_band,
    selections,
    selections_by_size,
)
from .look import MOST_STRONG, ON_DARK, WEAK, Look, looks
from .methods import method_of
from .numbers import Summary
from .plots import (
    ABSCISSAE,
    CAPTION,
    SELECTED_FIRST,
    first_in_colour,
    goal_of,
    metrics_of,
    setting_text,
)
from .runs import Run, by_sampler
from .summary import ranked
from .text import (
    DASH,
    capital,
    cells_of,
    cost_rows,
    goal_text,
    metric_text,
)
from .verdict import headline, remarks

#: The columns of one line of a figure; those that are drawn are x, y, low and high.
Columns = dict[str, Array]
#: Of the clients with a name a page has room for.
_MOST_NAMED = 100


class _Drawn(NamedTuple):
    """A Bokeh figure, its heading, and what is said below it."""

    figure: Any
    heading: str
    below: str


class _Scale(NamedTuple):
    """The axis of the dots of a column, and where it has lines; what is beyond is at its edge."""

    place: Callable[[float], float]
    start: float
    end: float
    marks: tuple[float, ...]

    def percent(self, value: float) -> float:
        first = self.place(self.start)
        share = (self.place(max(value, self.start)) - first) / (self.place(self.end) - first)
        return round(100 * min(share, 1.0), 1)


_SCALES = {
    "gap": _Scale(float, -0.5, 1.25, (0.0, 1.0)),
    "speedup": _Scale(math.log, 0.25, 8.0, (1.0,)),
}


class Part(NamedTuple):
    """One comparison of a report: its runs, their numbers, and the command that makes it again."""

    title: str
    runs: Sequence[Run]
    summary: Summary
    command: str = ""


def write_report(parts: Sequence[Part], path: Path | str, title: str) -> None:
    """Write a page of one or several comparisons; with the script that draws, packed to 0.4 MB.

    Raises:
        MissingExtraError: If Bokeh is not installed.
    """
    require("bokeh", "plot")
    from bokeh.embed import json_item
    from bokeh.resources import INLINE
    from jinja2 import Environment
    from markupsafe import Markup

    sections = []
    items = []
    titles = {name: over.label for name, over in ABSCISSAE.items()}
    for part in parts:
        titles |= _titles(part)
        figures = _figures(part)
        sections.append(_section(part, figures))
        items.append({name: json_item(drawn.figure) for name, drawn in figures.items()})
    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    # One file that names no other: the environment needs no loader.
    page = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    ).from_string(template)
    html = page.render(
        title=title,
        sections=sections,
        scales=_SCALES,
        # Letters and digits, too long for a name.
        figures=Markup(_packed(json.dumps(items))),
        script=Markup(_packed(INLINE.js_raw[0])),
        constants={
            "most": MOST_STRONG,
            "weak": WEAK,
            "weakDark": ON_DARK[WEAK],
            "titles": titles,
        },
    )
    write_with_folder(Path(path), html)


def _shown(value: Any) -> Any:
    """What the template shows of an expression; what is HTML already is none of others' texts."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(value, limit=4000)
    return value


def _packed(text: str) -> str:
    """What ``unpack`` of the page reads: without it, the script alone has 1.3 MB."""
    # Without the time of packing: the same report has the same bytes.
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _titles(part: Part) -> dict[str, str]:
    """The axes of the metrics that the curves of a part can show, the one it is judged by first."""
    names = [part.summary.metric, *metrics_of(part.runs)]
    if all(np.isnan(run.accuracy_r).all() for run in part.runs):
        names = [name for name in names if name != "accuracy"]
    return {name: judge_of(name, part.summary.judges).title for name in names}


def _section(part: Part, figures: Mapping[str, _Drawn]) -> dict[str, Any]:
    """What the template shows of a part."""
    summary = part.summary
    goal = goal_text(summary.judge, summary.threshold)
    headings = {
        "gap": "gap closed",
        "speedup": "speed-up",
        "value": summary.judge.title,
        "area": "mean over rounds",
        "tail": f"worst tenth,{summary.judge.unit}".rstrip(","),
        "spread": "sd over clients",
        "rounds": f"rounds to {goal}",
        "bytes": f"bytes to {goal}".removesuffix(" to none"),
    }
    result = headline(summary)
    # All samplers of a comparison have the same columns.
    shown = cells_of(summary.samplers[0], summary)
    return {
        "part": part,
        "command": printable(part.command, limit=None),
        "setting": f"{setting_text(part.runs)}. In brackets: {100 * summary.confidence:g} %",
        "headline": result,
        "remarks": [text for text in remarks(summary) if text not in result],
        "headings": {name: text for name, text in headings.items() if name in shown},
        "rows": _rows(summary),
        "figures": figures,
        "controls": {
            "metric": _titles(part),
            "over": {name: ABSCISSAE[name].label for name in _recorded(part.runs)},
            "scale": {name: name for name in ("linear", "log y", "log x")},
        },
        "costs": cost_rows(summary),
        "by_name": [*client_tables(part)],
    }


def client_tables(part: Part) -> Iterator[tuple[str, list[list[str]], str]]:
    """The tables of strata and of clients that have names: a heading, rows, and what is said below
    them.
    """
    judge = part.summary.judge
    first = part.runs[0]
    if not first.client_strata and not first.client_names:
        return
    table = clients_of(part.runs)
    if first.client_strata:
        of_runs = table.groupby(["stratum", "sampler", "seed"])
        # Each client of a stratum counts once, and then each seed.
        strata = of_runs[["draws", judge.name]].mean().assign(clients=of_runs.size())
        rows = _rows_by_name(part, strata, ["stratum", "clients"])
        note = (
            f"{capital(judge.title)}, the mean over the clients of a stratum, each on its own test "
            "examples or, where these have no owners, by its classes; in brackets how often one of "
            "them was selected. Means over seeds."
        )
        yield "Strata", [*rows], note
    if first.client_names:
        rows = _rows_by_name(part, table, ["client", "examples"])
        note = (
            f"{capital(judge.title)}; in brackets how often the client was selected. Means over "
            "seeds, the worst first, by their mean over samplers."
        )
        count = table["client"].nunique()
        if count > _MOST_NAMED:
            note += (
                f" The first {_MOST_NAMED} of {count:,}: deltafl.load(FOLDER).clients() has all."
            )
        yield "Clients by name", [*islice(rows, 1 + _MOST_NAMED)], note


def _rows_by_name(part: Part, table: Any, columns: Sequence[str]) -> Iterator[list[str]]:
    """A row for each stratum or client: its size, and under each sampler its metric with how often
    it was selected; clients the worst first.
    """
    name, size = columns
    judge = part.summary.judge
    labels = [entry.sampler for entry in ranked(part.summary)]
    yield [*columns, *labels]
    means = table.groupby([name, "sampler"])[[size, "draws", judge.name]].mean().unstack()
    if name == "client":
        # Of all samplers, so that no sampler's own worst clients stand first.
        score = judge.sign * means[judge.name].mean(axis=1, skipna=False)
        # Ties in the order of the clients, and last who has no value.
        order = score.reindex(table[name].unique()).sort_values(kind="stable").index
        means = means.loc[order]
    # With other seeds a sampler may have met others.
    for key, row in means[means["draws"].notna().all(axis=1)].iterrows():
        count = row[size, labels[0]]
        cells = [
            f"{metric_text(row[judge.name, label], judge)} ({row['draws', label]:,.1f})"
            for label in labels
        ]
        yield [key, DASH if np.isnan(count) else f"{count:,.0f}", *cells]


def _rows(summary: Summary) -> list[dict[str, Any]]:
    """The rows of the board, the best first, which are the legend too."""
    order = ranked(summary)
    look_of = looks([entry.sampler for entry in order])
    ranks = first_in_colour(summary)
    return [
        {
            "label": entry.sampler,
            "look": look_of[entry.sampler],
            "dark": ON_DARK[look_of[entry.sampler].colour],
            "rank": ranks.index(entry.sampler),
            "needs": _needs(entry.sampler),
            "cells": cells_of(entry, summary),
        }
        for entry in order
    ]


def _needs(label: str) -> str:
    """What a method must know, in a few words, and whether it is biased."""
    method = method_of(label)
    if method is None or base_name(label) not in SAMPLERS:
        return ""
    words = f"knows {SHORT_NEEDS[SAMPLERS[base_name(label)].needs]}"
    if bias_of(method) is not None:
        return f"biased; {words}"
    return words


def _figures(part: Part) -> dict[str, _Drawn]:
    """The figures of a part: curves, and where they were recorded selections and clients."""
    summary = part.summary
    title = summary.judge.title
    groups = by_sampler(part.runs)
    look_of = looks([entry.sampler for entry in ranked(summary)])
    curves = {label: _curve_columns(groups[label]) for label in look_of}
    plot = _figure(curves, look_of, "rounds", title)
    below = f"{CAPTION} The best {MOST_STRONG} that are switched on have colours, others are grey."
    goal = goal_of(summary)
    if goal is not None:
        from bokeh.models.annotations import Span

        line = Span(
            location=goal,
            dimension="width",
            name=summary.metric,
            line_dash=[6, 4],
            line_color="#888888",
        )
        plot.add_layout(line)
        below += f" Dashed: {goal_text(summary.judge, summary.threshold)}."
    found = {"curves": _Drawn(plot, "Curves", below)}
    selected: Mapping[str, Band | None] = selections(groups)
    x_label = SELECTED_FIRST
    below = "A flat line is an even choice. Full participation, which selects all, is left out."
    by_size = {label: selections_by_size(groups[label]) for label in selected}
    # Only if all methods have sizes: one axis has one meaning.
    if all(by_size.values()):
        selected = by_size
        x_label = "examples of a client"
        below += " Clients in tenths by their size. Band: the middle 80 % of a tenth."
    clients = {label: client_values(groups[label]) for label in look_of}
    pictures = {
        "selections": (
            selected,
            x_label,
            "times selected",
            "Who was selected how often",
            below,
        ),
        "clients": (
            clients,
            "clients, the worst first, %",
            title,
            f"{capital(summary.judge.heading)} per client",
            "On the client's own test examples; where these have no owners, the accuracies of its "
            "classes, weighted by its shares of labels. Mean over the last evaluations.",
        ),
    }
    for name, (bands, x_label, y_label, *texts) in pictures.items():
        lines = {label: _columns(band) for label in look_of if (band := bands.get(label))}
        if lines:
            found[name] = _Drawn(_figure(lines, look_of, x_label, y_label), *texts)
    return found


def _columns(band: Band) -> Columns:
    return dict(zip(("x", "y", "low", "high"), band, strict=True))


def _curve_columns(runs: Sequence[Run]) -> Columns:
    """Mean and range of each metric over seeds, and where these evaluations lie in rounds,
    megabytes, seconds and so on.
    """
    columns = _columns(curve_band(runs, runs[0].metric))
    for metric in metrics_of(runs):
        band = curve_band(runs, metric)
        columns |= {
            metric: band.mean_r,
            f"{metric}_low": band.low_r,
            f"{metric}_high": band.high_r,
        }
    return columns | {name: ABSCISSAE[name].mean(runs) for name in _recorded(runs)}


def _recorded(runs: Sequence[Run]) -> list[str]:
    """What the curves of these runs can be drawn over."""
    return [
        name for name, over in ABSCISSAE.items() if all(over.of(run) is not None for run in runs)
    ]


def _narrowed(column: Array) -> Array:
    """Half of the bytes in the page, and no picture shows more digits; what does not fit stays."""
    if (np.abs(column) > np.finfo(np.float32).max).any():
        return column
    return column.astype(np.float32)


def _figure(
    lines: Mapping[str, Columns],
    look_of: Mapping[str, Look],
    x_label: str,
    y_label: str,
) -> Any:
    """Lines with bands, the best on top; each has the name of its sampler, by which the page
    switches it.
    """
    from bokeh.models import ColumnDataSource, HoverTool, PlainText
    from bokeh.plotting import figure

    plot = figure(
        height=360,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        x_axis_label=PlainText(text=x_label),
        y_axis_label=PlainText(text=y_label),
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    drawn: list[Any] = []
    for label in reversed([*lines]):
        look = look_of[label]
        source = ColumnDataSource(
            {name: _narrowed(column) for name, column in lines[label].items()}
        )
        plot.varea(
            "x",
            "low",
            "high",
            source=source,
            name=label,
            fill_color=look.colour,
            fill_alpha=0.14,
        )
        line = plot.line(
            "x",
            "y",
            source=source,
            name=label,
            line_color=look.colour,
            line_width=2.25,
            line_dash=[round(2 * length) for length in look.lengths],
        )
        drawn.append(line)
    for axis in plot.axis:
        axis.axis_label_text_font = axis.major_label_text_font = "system-ui"
        axis.axis_label_text_font_style = "normal"
        axis.minor_tick_line_color = None
    rows = {
        "sampler": "$name",
        x_label: "@x{0,0.[00]}",
        y_label: "@y{0,0.[000]}",
        "band": "@low{0,0.[000]} to @high{0,0.[000]}",
    }
    plot.add_tools(
        HoverTool(
            renderers=drawn,
            tooltips=[*rows.items()],
            line_policy="nearest",
        )
    )
    return plot
