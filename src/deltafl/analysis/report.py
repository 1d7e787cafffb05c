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
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import require
from ..io import write_atomically
from ..samplers.label import base_name, bias_of
from ..samplers.table import SAMPLERS, SHORT_NEEDS
from .looks import MOST_STRONG, ON_DARK, WEAK, Look, looks
from .methods import method_of
from .numbers import GapClosed, SamplerSummary, SpeedUp, Summary, value_of
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
from .summary import ranked, references
from .text import COSTS, cells_of, cost_cells, plus_minus, threshold_text
from .verdict import headline, remarks

#: The columns of one line of a figure; those that are drawn are x, y, low and high.
Columns = dict[str, npt.NDArray[Any]]
_SIZES = "examples of a client"
#: The figures of a part: their headings and what is said below them.
_BELOW = {
    "curves": (
        "Curves",
        f"{CAPTION} The best {MOST_STRONG} that are switched on have colours, others are grey.",
    ),
    "selections": (
        "Who was selected how often",
        "A flat line is an even choice. Full participation, which selects all, is left out.",
    ),
    "clients": (
        "Accuracy per client",
        "On the client's own test examples; where these have no owners, the accuracies of its "
        "classes, weighted by its shares of labels. Mean over the last evaluations.",
    ),
}


class _Scale(NamedTuple):
    """The axis of the dots of a column, and where it has lines; what is beyond is at its edge."""

    place: Callable[[float], float]
    start: float
    end: float
    marks: tuple[float, ...]

    def percent(self, value: float) -> float:
        first, last, at = (self.place(it) for it in (self.start, self.end, max(value, self.start)))
        return round(100 * min((at - first) / (last - first), 1.0), 1)


_SCALES = {
    "gap": _Scale(float, -0.5, 1.25, (0.0, 1.0)),
    "speedup": _Scale(math.log, 0.25, 8.0, (1.0,)),
}
#: The columns of the board, after the samplers.
_COLUMNS = ("gap", "speedup", "value", "area", "tail", "rounds", "bytes")


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
    links = ""
    for number, part in enumerate(parts):
        figures = _figures(part)
        sections.append(_section(part, number, figures))
        items.append({name: json_item(figure) for name, figure in figures.items()})
        links += f'<a href="#part-{number}">{escape(part.title)}</a>'
    script = {"most": MOST_STRONG, "weak": WEAK, "weakDark": ON_DARK[WEAK]}
    template = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(title),
        links=f"<nav>{links}</nav>" if len(parts) > 1 else "",
        sections="\n".join(sections),
        figures=_packed(json.dumps(items)),
        script=_packed(INLINE.js_raw[0]),
        constants=json.dumps({**script, "titles": METRICS | OVER}),
    )
    write_atomically(Path(path), page)


def _packed(text: str) -> str:
    """What ``unpack`` of the page reads: without it, the script alone has 1.3 MB."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _section(part: Part, number: int, figures: Mapping[str, Any]) -> str:
    summary = part.summary
    first, *more = map(escape, headline(summary))
    *notes, columns = map(escape, remarks(summary))
    confidence = f"In brackets: {100 * summary.confidence:g} % intervals."
    blocks = [
        f'<section class="part" id="part-{number}">',
        _note(escape(f"{part.title}: {setting_text(part.runs)}. {confidence}")),
        f"<h1>{first}</h1>",
        *(f"<p>{sentence}</p>" for sentence in more),
    ]
    if part.command:
        blocks.append(_note(f"Repeat it: <code>{_command(part.command)}</code>", "note command"))
    blocks += [_board(summary), _note(columns)]
    for name, figure in figures.items():
        heading, text = _BELOW[name]
        controls = ""
        if name == "curves":
            controls = _controls(part)
            text += f" Dashed: {threshold_text(summary)}." if summary.threshold else ""
        if figure.xaxis.axis_label == _SIZES:
            text += " Clients in tenths by their size. Band: the middle 80 % of a tenth."
        blocks.append(
            f'<h2>{heading}</h2>{controls}<p class="legend"></p>'
            f'<figure data-figure="{name}"></figure>{_note(text)}'
        )
    blocks.append(_details("What else the numbers show", "".join(f"<p>{it}</p>" for it in notes)))
    if any(entry.costs for entry in summary.samplers):
        lines = [[entry.sampler, *cost_cells(entry)] for entry in summary.samplers]
        blocks.append(_details("What a run costs", _facts([["costs of a run", *COSTS], *lines])))
    for title, facts in (
        ("Settings", summary.settings),
        ("Data and environment", summary.environment),
    ):
        if facts:
            blocks.append(_details(title, _facts([[key, _value(it)] for key, it in facts.items()])))
    return "\n".join([*blocks, "</section>"]).replace(" %", "\N{NO-BREAK SPACE}%")


def _note(text: str, kind: str = "note") -> str:
    return f'<p class="{kind}">{text}</p>'


def _command(text: str) -> str:
    """A command that breaks between its words and after commas, not at hyphens."""
    return " ".join(
        f"<span>{escape(word).replace(',', ',<wbr>')}</span>" for word in text.split(" ")
    )


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def _facts(lines: Sequence[Sequence[str]]) -> str:
    rows = []
    for head, *cells in lines:
        texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th>{escape(head)}</th>{texts}</tr>")
    return f'<table class="facts">{"".join(rows)}</table>'


def _value(found: Any) -> str:
    return ", ".join(map(str, found)) if isinstance(found, list) else str(found)


def _controls(part: Part) -> str:
    over = dict(OVER)
    if part.runs[0].clock_r is None:
        del over["clock"]
    choices: dict[str, dict[str, str]] = {
        "metric": {name: METRICS[name] for name in (part.summary.metric, "loss")},
        "over": over,
        "scale": {name: name for name in ("linear", "log y", "log x")},
    }
    selects = ""
    for name, texts in choices.items():
        options = "".join(
            f'<option value="{value}">{text}</option>' for value, text in texts.items()
        )
        selects += f'<label>{name} <select name="{name}">{options}</select></label>'
    return f'<div class="controls">{selects}</div>'


def _board(summary: Summary) -> str:
    """The leaderboard, which is the legend too: a row switches its sampler on and off in all
    figures.
    """
    order = ranked(summary)
    ends = references(summary)
    look_of = looks([entry.sampler for entry in order])
    strong = sorted(order, key=lambda entry: entry.sampler not in ends)
    shown = {"area", *cells_of(order[0], summary)}
    columns = [name for name in _COLUMNS if name in shown]
    rows = ""
    for entry in order:
        rows += _row(entry, summary, look_of[entry.sampler], strong.index(entry), columns)
    goal = threshold_text(summary)
    texts = {
        "gap": "gap closed",
        "speedup": "speed-up",
        "value": METRICS[summary.metric],
        "area": "mean over rounds",
        "tail": "worst tenth, %",
        "rounds": f"rounds to {goal}",
        "bytes": "bytes" if summary.threshold is None else f"bytes to {goal}",
    }
    heads = "".join(
        f'<th aria-sort="none"><button type="button" data-column="{place}">{text}</button></th>'
        for place, text in enumerate(["sampler", *(texts[name] for name in columns)])
    )
    return (
        '<div class="tools"><input type="search" placeholder="filter samplers" aria-label="filter '
        'samplers"><button type="button" data-switch="all">all</button><button type="button" '
        'data-switch="none">none</button></div>'
        '<div class="wide" tabindex="0" role="region" aria-label="results"><table class="board">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(
    entry: SamplerSummary, summary: Summary, look: Look, rank: int, columns: Sequence[str]
) -> str:
    texts = {**cells_of(entry, summary), "area": plus_minus(entry.area, summary.metric)}
    numbers = _numbers(entry, summary)
    differences = {"gap": entry.gap_closed, "speedup": entry.speedup}
    bars = {name: _bar(_SCALES[name], found) for name, found in differences.items() if found}
    swatch = (
        '<svg viewBox="0 0 28 8" aria-hidden="true"><path d="M0 4H28" '
        f'stroke-dasharray="{" ".join(f"{2 * length:g}" for length in look.lengths) or "none"}"/>'
        "</svg>"
    )
    label = f'<label><input type="checkbox" checked>{swatch}{escape(entry.sampler)}</label>'
    cells = f'<th scope="row">{label}<small>{_needs(entry.sampler)}</small></th>'
    for name in columns:
        text, _, more = texts[name].partition("\n")
        number = numbers.get(name)
        value = "" if number is None else f' data-value="{number!r}"'
        cells += (
            f'<td data-name="{name}"{value}>{bars.get(name, "")}'
            f"<span>{text} <small>{more}</small></span></td>"
        )
    data = f'data-rank="{rank}" data-colour="{look.colour}" data-dark="{ON_DARK[look.colour]}"'
    return f'<tr data-sampler="{escape(entry.sampler)}" {data}>{cells}</tr>'


def _numbers(entry: SamplerSummary, summary: Summary) -> dict[str, float | None]:
    """The numbers by which the columns of the board are sorted."""
    numbers = {"value": value_of(entry, summary).mean, "bytes": entry.total_bytes}
    if entry.area is not None:
        numbers["area"] = entry.area.mean
    if entry.gap_closed is not None:
        numbers["gap"] = entry.gap_closed.value
    if entry.fairness is not None:
        numbers["tail"] = entry.fairness.worst_tenth.mean
    if entry.to_threshold is not None:
        numbers["bytes"] = entry.to_threshold.bytes
        if entry.to_threshold.rounds is not None:
            numbers["rounds"] = entry.to_threshold.rounds.mean
    if entry.speedup is not None:
        numbers["speedup"] = entry.speedup.ratio
    return numbers


def _needs(label: str) -> str:
    """What a method must know, in a few words, and whether it is biased."""
    method = method_of(label)
    if method is None or base_name(label) not in SAMPLERS:
        return ""
    words = f"knows {SHORT_NEEDS[SAMPLERS[base_name(label)].needs]}"
    return words if bias_of(method) is None else f"biased; {words}"


def _bar(scale: _Scale, found: GapClosed | SpeedUp) -> str:
    """A dot with its interval, and lines where it would mean nothing or everything."""
    line = "".join(f'<u style="left:{scale.percent(mark)}%"></u>' for mark in scale.marks)
    if found.low is not None and found.high is not None:
        left = scale.percent(found.low)
        line += f'<i style="left:{left}%;width:{scale.percent(found.high) - left:.1f}%"></i>'
    return f'<span class="bar">{line}<b style="left:{scale.percent(found.value)}%"></b></span>'


def _figures(part: Part) -> dict[str, Any]:
    """The Bokeh figures of a part: curves, and where they were recorded selections and
    clients.
    """
    groups = by_sampler(part.runs)
    look_of = looks([entry.sampler for entry in ranked(part.summary)])
    metric = part.summary.metric
    curves = {label: _curve_columns(groups[label]) for label in look_of}
    found = {"curves": _figure(curves, look_of, "rounds", METRICS[metric])}
    goal = goal_of(part.summary)
    if goal is not None:
        from bokeh.models.annotations import Span

        line = Span(
            location=goal, dimension="width", name=metric, line_dash=[6, 4], line_color="#888888"
        )
        found["curves"].add_layout(line)
    selected = selections(groups)
    by_size = {label: selections_by_size(groups[label]) for label in selected}
    if selected and all(by_size.values()):
        found["selections"] = _figure_of(by_size, look_of, _SIZES, "times selected")
    elif selected:
        found["selections"] = _figure_of(selected, look_of, SELECTED_FIRST, "times selected")
    clients = {label: client_accuracies(groups[label]) for label in look_of}
    if any(clients.values()):
        x_label = "clients, the worst first, %"
        found["clients"] = _figure_of(clients, look_of, x_label, METRICS["accuracy"])
    return found


def _figure_of(
    bands: Mapping[str, Band | None], look_of: Mapping[str, Look], x_label: str, y_label: str
) -> Any:
    lines = {label: _columns(band) for label in look_of if (band := bands.get(label))}
    return _figure(lines, look_of, x_label, y_label)


def _columns(band: Band) -> Columns:
    return dict(zip(("x", "y", "low", "high"), band, strict=True))


def _curve_columns(runs: Sequence[Run]) -> Columns:
    """Mean and range of each metric over seeds, and where these evaluations lie in rounds,
    megabytes and seconds.
    """
    columns = _columns(curve_band(runs, runs[0].metric))
    for metric in METRICS:
        band = curve_band(runs, metric)
        columns |= {metric: band.mean_r, f"{metric}_low": band.low_r, f"{metric}_high": band.high_r}
    columns["round"] = band.round_r
    columns["bytes"] = band_of([(run.round_r, run.bytes_r / 1e6) for run in runs]).mean_r
    columns["seconds"] = band_of([(run.round_r, run.seconds_r) for run in runs]).mean_r
    if runs[0].clock_r is not None:
        columns["clock"] = mean_clock(runs)
    return columns


def _figure(
    lines: Mapping[str, Columns], look_of: Mapping[str, Look], x_label: str, y_label: str
) -> Any:
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
        y_axis_label=y_label,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
    )
    drawn: list[Any] = []
    for label in reversed([*lines]):
        look = look_of[label]
        source = ColumnDataSource(
            {name: column.astype(np.float32) for name, column in lines[label].items()}
        )
        plot.varea(
            "x", "low", "high", source=source, name=label, fill_color=look.colour, fill_alpha=0.14
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
    plot.add_tools(HoverTool(renderers=drawn, tooltips=[*rows.items()], line_policy="nearest"))
    return plot
