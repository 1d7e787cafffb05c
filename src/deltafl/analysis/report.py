"""The report: one HTML file that shows a comparison, opens from a disk and asks the network for
nothing. Needs Bokeh.

Python writes the sentences, the table with its dots and bars, and the figures; ``report.html`` has
the style and the script that switches samplers, axes and colours. Numbers are those of the
``Summary``: none is computed twice.
"""

import gzip
import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.text import Text

from ..errors import require
from ..io import write_atomically
from ..samplers import SAMPLERS, base_name, is_unbiased
from ..samplers.table import SHORT_NEEDS
from .headline import headline
from .looks import MOST_STRONG, ON_DARK, WEAK, Look, looks
from .plots import (
    CAPTION,
    METRICS,
    OVER,
    SELECTED_FIRST,
    Band,
    band_of,
    client_accuracies,
    curve_band,
    goal_of,
    mean_clock,
    selections,
    selections_by_size,
    setting_text,
)
from .runs import Run, by_sampler
from .summary import GapClosed, SamplerSummary, SpeedUp, Summary, ranked, references, value_of
from .table import COSTS, cost_cells, plus_minus, remarks, table_row, threshold_text, without_part

if TYPE_CHECKING:
    from bokeh.models.renderers import DataRenderer
    from bokeh.plotting import figure as Figure

#: The columns of one line of a figure; those that are drawn are x, y, low and high.
Columns = dict[str, npt.NDArray[Any]]
#: Ends of the axes of dots and bars, by column; beyond them, a number is drawn at the edge.
_ENDS = {"gap": (-0.5, 1.25), "speedup": (0.25, 8.0)}
_SIZES = "examples of a client"
_ORDER = ("sampler", "gap", "speedup", "value", "area", "tail", "rounds", "bytes")


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

    sections = []
    items = []
    for number, part in enumerate(parts):
        figures = _figures(part)
        sections.append(_section(part, number, figures))
        items.append({name: json_item(figure) for name, figure in figures.items()})
    links = "".join(
        f'<a href="#part-{number}">{escape(part.title)}</a>' for number, part in enumerate(parts)
    )
    template = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(title),
        links=f"<nav>{links}</nav>" if len(parts) > 1 else "",
        sections="\n".join(sections),
        figures=_packed(json.dumps(items)),
        script=_packed(INLINE.js_raw[0]),
        constants=json.dumps(
            {"most": MOST_STRONG, "weak": WEAK, "weakDark": ON_DARK[WEAK], "titles": METRICS | OVER}
        ),
    )
    write_atomically(Path(path), page)


def _packed(text: str) -> str:
    """What ``unpack`` of the page reads: without it, the script alone has 1.3 MB."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _section(part: Part, number: int, figures: Mapping[str, Any]) -> str:
    summary = part.summary
    first, *more = map(escape, headline(summary))
    best, *words = first.split(" ")
    if best in {escape(entry.sampler) for entry in summary.samplers}:
        first = " ".join([f"<b>{best}</b>", *words])
    *notes, columns = map(escape, remarks(summary))
    what = (
        f"{part.title}: {setting_text(part.runs)}. In brackets: {100 * summary.confidence:g} % "
        "intervals."
    )
    blocks = [
        f'<section class="part" id="part-{number}">',
        _note(escape(what)),
        f"<h1>{first}</h1>",
    ]
    blocks += [f"<p>{sentence}</p>" for sentence in more]
    blocks += (
        [_note(f"Repeat it: <code>{_command(part.command)}</code>", "note command")]
        if part.command
        else []
    )
    blocks += [_table(ranked(summary), summary), _note(columns)]
    goal = f" Dashed: {threshold_text(summary)}." if summary.threshold is not None else ""
    text = (
        f"{CAPTION}{goal} The best {MOST_STRONG} that are switched on have colours, others are "
        "grey."
    )
    blocks += _shown("Curves", "curves", text, _controls(part))
    if "selections" in figures:
        text = "A flat line is an even choice. Full participation, which selects all, is left out."
        if figures["selections"].xaxis.axis_label == _SIZES:
            text += " Clients in tenths by their size. Band: the middle 80 % of a tenth."
        blocks += _shown("Who was selected how often", "selections", text)
    if "clients" in figures:
        text = (
            "On the client's own test examples; where these have no owners, the accuracies of "
            "its classes, "
        )
        text += "weighted by its shares of labels. Mean over the last evaluations."
        blocks += _shown("Accuracy per client", "clients", text)
    blocks += [_details("What else the numbers show", "".join(f"<p>{note}</p>" for note in notes))]
    if any(entry.costs for entry in summary.samplers):
        lines = [
            ("costs of a run", *COSTS),
            *((entry.sampler, *cost_cells(entry)) for entry in summary.samplers),
        ]
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines)
        blocks += [
            _details(
                "What a run costs",
                f'<table class="facts"><tr>{"</tr><tr>".join(cells)}</tr></table>',
            )
        ]
    blocks += [
        _facts("Settings", summary.settings),
        _facts("Data and environment", summary.environment),
    ]
    return "\n".join([*blocks, "</section>"]).replace(" %", "\N{NO-BREAK SPACE}%")


def _note(text: str, kind: str = "note") -> str:
    return f'<p class="{kind}">{text}</p>'


def _shown(title: str, figure: str, text: str, controls: str = "") -> list[str]:
    return [
        f'<h2>{title}</h2>{controls}<p class="legend"></p><figure data-figure="{figure}"></figure>',
        _note(text),
    ]


def _controls(part: Part) -> str:
    selects = []
    metrics = dict.fromkeys([part.summary.metric, "loss"])
    over = [name for name in OVER if name != "clock" or part.runs[0].clock_r is not None]
    for name, choices in (
        ("metric", metrics),
        ("over", over),
        ("scale", ("linear", "log y", "log x")),
    ):
        texts = {value: METRICS.get(value) or OVER.get(value, value) for value in choices}
        options = "".join(
            f'<option value="{value}">{text}</option>' for value, text in texts.items()
        )
        selects.append(f'<label>{name} <select name="{name}">{options}</select></label>')
    return f'<div class="controls">{"".join(selects)}</div>'


def _table(order: Sequence[SamplerSummary], summary: Summary) -> str:
    """The leaderboard, which is the legend too: a row switches its sampler on and off in all
    figures.
    """
    look_of = looks([entry.sampler for entry in order])
    names = [name for name in _ORDER if name in {"area", *table_row(order[0], summary)}]
    strong = sorted(order, key=lambda entry: entry.sampler not in references(summary))
    rows = "".join(
        _row(entry, summary, look_of[entry.sampler], strong.index(entry), names) for entry in order
    )
    goal = threshold_text(summary)
    texts = {
        "value": METRICS[summary.metric],
        "area": "mean over rounds",
        "gap": "gap closed",
        "speedup": "speed-up",
    }
    texts |= {"tail": "worst tenth, %", "rounds": f"rounds to {goal}"}
    texts |= {} if summary.threshold is None else {"bytes": f"bytes to {goal}"}
    heads = "".join(
        (
            '<th aria-sort="none"><button type="button" '
            f'data-column="{place}">{texts.get(name, name)}</button></th>'
        )
        for place, name in enumerate(names)
    )
    table = f'<table class="board"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    switches = "".join(
        f'<button type="button" data-switch="{name}">{name}</button>' for name in ("all", "none")
    )
    tools = (
        '<input type="search" placeholder="filter samplers" aria-label="filter '
        f'samplers">{switches}'
    )
    wide = f'<div class="wide" tabindex="0" role="region" aria-label="results">{table}</div>'
    return f'<div class="tools">{tools}</div>{wide}'


def _row(
    entry: SamplerSummary, summary: Summary, look: Look, rank: int, names: Sequence[str]
) -> str:
    texts = table_row(entry, summary)
    gap = entry.gap_closed
    to = entry.to_threshold
    speedup, rounds = (None, None) if to is None else (to.speedup, to.rounds)
    numbers: dict[str, float | None] = {
        "gap": None if gap is None else gap.value,
        "speedup": None if speedup is None else speedup.ratio,
        "value": value_of(entry, summary).mean,
        "tail": None if entry.fairness is None else entry.fairness.worst_tenth.mean,
        "rounds": None if rounds is None else rounds.mean,
        "area": None if entry.area is None else entry.area.mean,
        "bytes": entry.total_bytes if to is None else to.bytes,
    }
    texts["area"] = Text(plus_minus(entry.area, summary.metric == "accuracy"))
    intervals: dict[str, GapClosed | SpeedUp | None] = {"gap": gap, "speedup": speedup}
    dash = (
        "none"
        if isinstance(look.dash, str)
        else " ".join(f"{2 * length:g}" for length in look.dash[1])
    )
    swatch = (
        '<svg viewBox="0 0 28 8" aria-hidden="true"><path d="M0 4H28" '
        f'stroke-dasharray="{dash}"/></svg>'
    )
    label = f'<label><input type="checkbox" checked>{swatch}{escape(entry.sampler)}</label>'
    cells = [f'<th scope="row">{label}<small>{_needs(entry.sampler)}</small></th>']
    for name in names[1:]:
        number = numbers[name]
        found = intervals.get(name)
        (text, _, more) = texts[name].plain.partition("\n")
        value = "" if number is None else f' data-value="{number!r}"'
        bar = (
            ""
            if number is None or found is None
            else _bar(number, found.low, found.high, *_ENDS[name])
        )
        cells.append(
            f'<td data-name="{name}"{value}>{bar}<span>{text} <small>{more}</small></span></td>'
        )
    data = f'data-rank="{rank}" data-colour="{look.colour}" data-dark="{ON_DARK[look.colour]}"'
    return f'<tr data-sampler="{escape(entry.sampler)}" {data}>{"".join(cells)}</tr>'


def _needs(label: str) -> str:
    """What a method must know, in a few words, and whether it is biased."""
    if base_name(label) not in SAMPLERS:
        return ""
    words = SHORT_NEEDS[SAMPLERS[base_name(label)].needs]
    return f"knows {words}" if is_unbiased(without_part(label)) else f"biased; knows {words}"


def _command(text: str) -> str:
    """A command that breaks between its words and after commas, not at hyphens."""
    return " ".join(
        f"<span>{escape(word).replace(',', ',<wbr>')}</span>" for word in text.split(" ")
    )


def _bar(value: float, low: float | None, high: float | None, start: float, end: float) -> str:
    """A dot with its interval, and lines at a gap of 0 and 1, or at a ratio of 1 on a
    logarithmic axis.
    """
    is_ratio = start > 0

    def place(value: float) -> float:
        first, last, at = (
            math.log(max(it, start)) if is_ratio else it for it in (start, end, value)
        )
        return round(100 * min(max((at - first) / (last - first), 0.0), 1.0), 1)

    line = "".join(
        f'<u style="left:{place(mark)}%"></u>' for mark in ([1.0] if is_ratio else [0.0, 1.0])
    )
    if low is not None and high is not None:
        line += f'<i style="left:{place(low)}%;width:{place(high) - place(low):.1f}%"></i>'
    return f'<span class="bar">{line}<b style="left:{place(value)}%"></b></span>'


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    texts = {
        key: ", ".join(map(str, value)) if isinstance(value, list) else value
        for key, value in facts.items()
    }
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(str(text))}</td></tr>"
        for key, text in texts.items()
    )
    return _details(title, f'<table class="facts">{rows}</table>') if facts else ""


def _figures(part: Part) -> "dict[str, Figure]":
    groups = by_sampler(part.runs)
    look_of = looks([entry.sampler for entry in ranked(part.summary)])
    curves = {label: _curve_columns(groups[label]) for label in look_of}
    metric = part.summary.metric
    goal = goal_of(part.summary)
    found = {"curves": _figure(curves, look_of, "rounds", METRICS[metric])}
    if goal is not None:
        from bokeh.models.annotations import Span

        line = Span(
            location=goal, dimension="width", name=metric, line_dash=[6, 4], line_color="#888888"
        )
        found["curves"].add_layout(line)
    bands = selections(groups)
    x_label = SELECTED_FIRST
    by_size = {
        label: band for label in bands if (band := selections_by_size(groups[label])) is not None
    }
    if len(by_size) == len(bands):
        bands = by_size
        x_label = _SIZES
    if asked := {label: _columns(bands[label]) for label in look_of if label in bands}:
        found["selections"] = _figure(asked, look_of, x_label, "times selected")
    clients = {
        label: band for label in look_of if (band := client_accuracies(groups[label])) is not None
    }
    if clients:
        lines = {label: _columns(band) for label, band in clients.items()}
        found["clients"] = _figure(
            lines, look_of, "clients, the worst first, %", METRICS["accuracy"]
        )
    return found


def _columns(band: Band) -> Columns:
    return dict(zip(("x", "y", "low", "high"), band, strict=True))


def _curve_columns(runs: Sequence[Run]) -> Columns:
    """Mean and range of each metric over seeds, and where these evaluations lie in rounds,
    megabytes and seconds.
    """
    columns: Columns = {}
    for metric in METRICS:
        band = curve_band(runs, metric)
        columns |= {metric: band.mean_r, f"{metric}_low": band.low_r, f"{metric}_high": band.high_r}
    columns["round"] = band.round_r
    columns["bytes"] = band_of([(run.round_r, run.bytes_r / 1e6) for run in runs]).mean_r
    columns["seconds"] = band_of([(run.round_r, run.seconds_r) for run in runs]).mean_r
    if runs[0].clock_r is not None:
        columns["clock"] = mean_clock(runs)
    return columns | _columns(curve_band(runs, runs[0].metric))


def _figure(
    lines: Mapping[str, Columns], look_of: Mapping[str, Look], x_label: str, y_label: str
) -> "Figure":
    """Lines with bands, the best on top; each has the name of its sampler, by which the page
    switches it.
    """
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    plot = figure(
        height=360,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        x_axis_label=x_label,
    )
    plot.yaxis.axis_label = y_label
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    drawn: list[DataRenderer] = []
    for label in reversed([*lines]):
        colour = look_of[label].colour
        dash = look_of[label].dash
        source = ColumnDataSource(
            {name: column.astype(np.float32) for name, column in lines[label].items()}
        )
        plot.varea(
            "x", "low", "high", source=source, name=label, fill_color=colour, fill_alpha=0.14
        )
        pattern = "solid" if isinstance(dash, str) else [round(2 * length) for length in dash[1]]
        drawn += [
            plot.line(
                "x",
                "y",
                source=source,
                name=label,
                line_color=colour,
                line_width=2.25,
                line_dash=pattern,
            )
        ]
    for axis in (*plot.xaxis, *plot.yaxis):
        axis.axis_label_text_font = axis.major_label_text_font = "system-ui"
        axis.axis_label_text_font_style = "normal"
        axis.minor_tick_line_color = None
    value = "@y{0,0.[000]}"
    spread = "@low{0,0.[000]} to @high{0,0.[000]}"
    rows = [("sampler", "$name"), (x_label, "@x{0,0.[00]}"), (y_label, value), ("band", spread)]
    plot.add_tools(HoverTool(renderers=drawn, tooltips=rows, line_policy="nearest"))
    return plot
