"""What is to be seen of a run, a comparison or a federation while it goes on: ``deltafl watch``.

It is read from the folder alone: the lines of ``rounds.jsonl`` and the last saved state, by any
process, at any moment. Nothing is written, locked or imported there. The last line may be half
written, and a server that was killed may have written a round twice.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import TypedDict

from ..analysis.text import human_bytes, human_seconds
from ..errors import DeltaflError, printable
from ..federation.saved import FILES, LOG
from ..store.files import below
from ..store.lines import line_of
from ..store.sealed import read_sealed
from ..store.values import checked
from ..types import NO_REPLY, Array, Judge, judge_of
from .checkpoint import FILE
from .directory import recorded_settings
from .lines import Count, Number, RoundLine
from .record import noted_clients
from .sweep import whole_lines

#: Of a saved state: how often each client was selected, replied and was not there.
_COUNTS = tuple(f"state.{name}_m" for name in ("selected", "responded", "missed", "joined"))
#: Rounds after which it means something that a client was never there or never selected.
_ENOUGH = 5
_BARS = "▁▂▃▄▅▆▇█"
#: Points of a curve.
_WIDTH = 24
_CURE = "it is no record of deltafl, or damaged: watch another folder, or delete this one"


class _Line(RoundLine, total=False):
    """What is looked at in a line of ``rounds.jsonl`` beside what makes the record."""

    num_selected: Count
    effective_sample_size: Number
    largest_weight: Number
    variance: Number
    estimate_norm: Number
    loss: Number


class _Settings(TypedDict, total=False):
    """What is looked at in ``config.toml``."""

    task: str
    sampler: str
    samplers: list[str]
    seeds: list[int]
    rounds: Count


class _Header(TypedDict, total=False):
    """What is looked at in the header of a saved state."""

    sampler: str
    settings: dict[str, Any]
    strata: dict[str, str] | None


class Picture(NamedTuple):
    """What is shown, in a terminal or as a page."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str]  #: warnings, and how runs ended
    is_over: bool


class _Seen(NamedTuple):
    """What is known of one run or federation."""

    name: str
    lines: Sequence[Mapping[str, Any]]  #: one a round, in their order
    total: int | None  #: rounds in all, where that is known
    counts: Mapping[str, Array]  #: the last state's, by name; empty if there is none
    age: float | None  #: seconds since something was written
    strata: Sequence[str] = ()  #: of each client in ``counts``; empty where they are not known


def picture(place: Path) -> Picture:
    """What is to be seen in a folder, or in a file of a state, now.

    Raises:
        DeltaflError: If there is no run, comparison, federation or state, or one is damaged.
    """
    if place.is_file():
        return _alone(_of_state(place))
    if (place / FILES[0]).exists():
        return _alone(_of_state(place / FILES[0]))
    found = recorded_settings(place) if place.is_dir() else None
    if found is None:
        raise DeltaflError(
            f"{place} holds no run, comparison or federation: name the --out of deltafl run or "
            "compare, the state_path of a federation, or a file of save_state"
        )
    settings: Any = checked(_Settings, found, str(place / "config.toml"), _CURE)
    total = settings.get("rounds")
    if "samplers" not in settings:
        return _alone(_of_run(place, settings.get("sampler", place.name), total))
    runs = [
        _of_run(folder, folder.name, total)
        for folder in sorted(below(place, "runs").glob("*"))
        if folder.is_dir()
    ]
    # Runs that have not begun have no folder.
    planned = len(settings["samplers"]) * len(settings.get("seeds", [0]))
    return _side_by_side(printable(place), runs, planned)


def _of_run(folder: Path, name: str, total: int | None) -> _Seen:
    file = folder / FILE
    arrays, _ = _state(file) if file.exists() else ({}, {})
    strata = noted_clients(folder).strata
    return _Seen(
        printable(name, limit=60), _lines(folder), total, arrays, _age(folder / LOG), strata
    )


def _of_state(file: Path) -> _Seen:
    arrays, header = _state(file)
    round = int(arrays["state.round"])
    # A federation whose model was lost has gone back: what it wrote of later rounds is gone.
    lines = [line for line in _lines(file.parent) if line["round"] <= round]
    if file.name not in FILES:
        lines = []
    if not lines or lines[-1]["round"] < round:
        lines = [*lines, {"round": round}]
    known: Any = checked(_Header, header, str(file), _CURE)
    sampler = (known | known.get("settings", {})).get("sampler", file.name)
    strata = list((known.get("strata") or {}).values())
    return _Seen(printable(sampler, limit=60), lines, None, arrays, _age(file), strata)


def _state(file: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The counts of a saved state, and its header."""
    arrays, header = read_sealed(file, _CURE, mapped=True)
    counts = {name: arrays[name] for name in (*_COUNTS, "state.round") if name in arrays}
    shapes = [counts[name].shape for name in (*_COUNTS, "state.round") if name in counts]
    kinds = {array.dtype.kind for array in counts.values()}
    of_clients = shapes[0] if shapes else ()
    # ``joined`` is empty where all were there from the start.
    fitting = [[of_clients] * 3 + [joined, ()] for joined in (of_clients, (0,))]
    if shapes not in fitting or len(of_clients) != 1 or kinds != {"i"}:
        raise DeltaflError(f"{file} is no state of a run or federation: {_CURE}")
    return counts, header


def _lines(folder: Path) -> list[Mapping[str, Any]]:
    """The whole lines, one a round; of one that was written again the last."""
    file = folder / LOG
    found = [line_of(text, _Line, str(file), _CURE) for text in whole_lines(file)]
    by_round = {line["round"]: line for line in found}
    return [by_round[round] for round in sorted(by_round)]


def _age(file: Path) -> float | None:
    return max(0.0, time.time() - file.stat().st_mtime) if file.exists() else None


def _judge(lines: Sequence[Mapping[str, Any]]) -> Judge:
    """The metric that counts, as the first line says."""
    first = lines[0] if lines else {}
    judges = first.get("metrics", [])
    name = "loss" if first.get("test", {}).get("accuracy") is None else "accuracy"
    return judge_of(judges[0].name if judges else name, judges)


def _curve(values: Sequence[float | None]) -> str:
    """A curve of a line's height, of as many points as fit."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    places = np.linspace(0, len(known) - 1, min(len(known), _WIDTH)).round().astype(int)
    # From the least to the largest: where it moves is what a curve of one line can show.
    low, high = min(known), max(known)
    steps = [(known[place] - low) / ((high - low) or 1) for place in places]
    return " " + "".join(_BARS[round(step * (len(_BARS) - 1))] for step in steps)


def _metrics(seen: _Seen) -> Iterator[tuple[str, str]]:
    """Metrics on the test set, and else the clients' own loss."""
    tested = [line["test"] for line in seen.lines if "test" in line]
    judge = _judge(seen.lines)
    for each in dict.fromkeys((judge.name, "loss")):
        values = [test.get(each) for test in tested]
        if any(value is not None for value in values):
            shown = judge if each == judge.name else judge_of(each)
            yield f"test {shown.heading}", shown.text(values[-1]) + _curve(values)
    losses = [line.get("loss") for line in seen.lines]
    if not tested and any(loss is not None for loss in losses):
        yield "clients' loss", _number(losses[-1]) + _curve(losses)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _facts(seen: _Seen) -> dict[str, str]:
    """What is shown of one run, by name."""
    last = seen.lines[-1] if seen.lines else {"round": 0}
    facts = {"round": f"{last['round']}" + (f" of {seen.total}" if seen.total else "")}
    facts |= dict(_metrics(seen))
    if "num_selected" in last:
        n = last["num_selected"]
        facts["effective sample size"] = f"{_number(last.get('effective_sample_size'))} of {n}"
        facts["largest weight"] = _number(last.get("largest_weight"))
        facts["error of the estimate"] = _error(last)
    never, m = _never_selected(seen)
    if m:
        facts["never selected"] = f"{never} of {m} clients"
    facts |= {
        name: "unknown" if rate is None else f"{rate:.0%}" for name, rate in _rates(seen).items()
    }
    refused = _refused(seen)
    facts["replies refused"] = "none"
    if refused:
        texts = [f"{number} x {why}" for why, number in refused.most_common(3)]
        facts["replies refused"] = "; ".join(texts)
    facts["cost so far"] = _cost(seen)
    if seen.age is not None:
        facts["last written"] = f"{seen.age:.0f} s ago"
    return facts


def _error(line: Mapping[str, Any]) -> str:
    """The standard deviation of the estimate over draws, in lengths of the estimate."""
    variance, length = line.get("variance"), line.get("estimate_norm")
    if variance is None or not length:
        return "unknown"
    return f"{max(variance, 0) ** 0.5 / length:.0%} of its length"


def _never_selected(seen: _Seen) -> tuple[int, int]:
    """How many clients were never selected, and how many there are; (0, 0) if nobody knows."""
    if not seen.counts:
        return 0, 0
    selected_m = seen.counts[_COUNTS[0]] > 0
    # Lines are newer than the last checkpoint; where clients come and go they have no names.
    if not seen.counts[_COUNTS[3]].size:
        for line in seen.lines:
            known = [client for client in line.get("cohort", ()) if client < len(selected_m)]
            selected_m[known] = True
    return int((~selected_m).sum()), len(selected_m)


def _there(seen: _Seen) -> tuple[Array, Array]:
    """For how many rounds each client has been known, and in how many it was not there."""
    missed_m, joined_m = seen.counts[_COUNTS[2]], seen.counts[_COUNTS[3]]
    known_m = np.full(len(missed_m), int(seen.counts["state.round"]))
    return known_m - (joined_m if joined_m.size else 0), missed_m


def _without_clients(strata: Sequence[str], is_there_m: Array) -> list[str]:
    """The strata of which no client is there, by name."""
    # A folder of somebody else's may have a stratum for more clients than there are.
    if len(strata) != len(is_there_m):
        return []
    there = {stratum for stratum, is_there in zip(strata, is_there_m, strict=True) if is_there}
    return [printable(repr(name), limit=60) for name in dict.fromkeys(strata) if name not in there]


def _rates(seen: _Seen) -> dict[str, float | None]:
    """Which share of the selected replied, and which share of the clients was there."""
    if not seen.counts:
        return {}
    selected, responded = (int(seen.counts[name].sum()) for name in _COUNTS[:2])
    known_m, missed_m = _there(seen)
    return {
        "response rate": responded / selected if selected else None,
        "availability": 1 - missed_m.sum() / known_m.sum() if known_m.sum() > 0 else None,
    }


def _refused(seen: _Seen) -> Counter[str]:
    """Refused replies by reason; reasons that differ in their numbers are one."""
    return Counter(
        # The same fault has other numbers in every sentence.
        re.sub(r"\d[\d.e+-]*", "...", printable(reason, limit=100))
        for line in seen.lines
        for _, reason in line.get("rejected", ())
        if reason != NO_REPLY
    )


def _cost(seen: _Seen) -> str:
    """What was spent, and the place for what a plan foresaw."""
    # A census has answers in place of a cohort, and lines of a federation name nobody.
    trainings = sum(
        len(line.get("cohort", ())) or line.get("answers", 0) or line.get("num_selected", 0)
        for line in seen.lines
    )
    if seen.counts:  # a file of a state has no lines; it counts no client that was forgotten
        trainings = max(trainings, int(seen.counts[_COUNTS[0]].sum()))
    sent = sum(line.get("bytes_down", 0) + line.get("bytes_up", 0) for line in seen.lines)
    texts = [f"{trainings} trainings"]
    if sent:
        texts.append(human_bytes(sent))
    cost = sum(line.get("cost", 0) for line in seen.lines)
    if cost:
        texts.append(f"clients' cost {human_seconds(cost)}")
    return ", ".join(texts)


def _is_over(seen: _Seen) -> bool:
    last = seen.lines[-1] if seen.lines else {"round": 0}
    ended = {"stopped", "diverged"} & last.keys()
    return bool(ended) or (seen.total is not None and last["round"] >= seen.total)


def _remarks(seen: _Seen) -> Iterator[str]:
    """Warnings in words, and how it ended."""
    last: Mapping[str, Any] = seen.lines[-1] if seen.lines else {"round": 0}
    n = last.get("num_selected", 0)
    heaviest, size = last.get("largest_weight"), last.get("effective_sample_size")
    if n > 1 and heaviest is not None and heaviest > 0.5:
        yield f"The estimate hangs on one client: its weight is {heaviest:.2f}."
    elif n > 1 and size is not None and 0 < size < n / 3:
        yield f"The estimate hangs on few clients: {n} count like {size:.1f}."
    never, m = _never_selected(seen)
    if n and never and last["round"] * n >= _ENOUGH * m:
        yield f"{never} of {m} clients were never selected in {last['round']} rounds."
    if seen.counts:
        known_m, missed_m = _there(seen)
        is_away_m = (known_m >= _ENOUGH) & (missed_m >= known_m)
        away = int(is_away_m.sum())
        if away:
            yield f"{away} of {m} clients were never there: the model learns nothing from them."
        for name in _without_clients(seen.strata, ~is_away_m):
            yield f"Nobody of stratum {name} was ever there: the model learns nothing from it."
    rate = _rates(seen).get("response rate")
    if rate is not None and rate < 0.5:
        yield f"Only {rate:.0%} of the selected clients have replied."
    if n and len(last.get("rejected", ())) >= n:
        yield f"All replies of round {last['round']} were refused or missing."
    for entry, text in (("diverged", "Diverged"), ("suspect", "Its end is suspect")):
        if entry in last:
            yield f"{text} in round {last['round']}: {printable(last[entry]['why'], limit=300)}."
    if "stopped" in last:
        yield f"Stopped in round {last['round']}: {printable(last['stopped'], limit=300)}."
    elif _is_over(seen) and "diverged" not in last:
        yield f"Finished: all {last['round']} rounds are played."


def _alone(seen: _Seen) -> Picture:
    return Picture(seen.name, ("", ""), [*_facts(seen).items()], [*_remarks(seen)], _is_over(seen))


def _side_by_side(name: str, runs: Sequence[_Seen], planned: int) -> Picture:
    facts = [_facts(seen) for seen in runs]
    # Where a run is at its beginning, some are not known yet.
    known = [*dict.fromkeys(entry for each in facts for entry in each if entry != "last written")]
    done = sum(map(_is_over, runs))
    return Picture(
        f"{name}: {done} of {planned} runs are over",
        ("run", *(entry.replace(" ", "\n", 1) for entry in known)),
        [
            (seen.name, *(each.get(entry, "") for entry in known))
            for seen, each in zip(runs, facts, strict=True)
        ],
        [
            f"{seen.name}: {remark}"
            for seen in runs
            for remark in _remarks(seen)
            if not remark.startswith("Finished")
        ],
        done >= planned,
    )


def page(shown: Picture, every: float) -> str:
    """A picture as a page, which the browser loads again until all is over."""
    # Once all is over there is nothing to wait for.
    again = "" if shown.is_over else f'<meta http-equiv="refresh" content="{every:g}">'
    head = "".join(f"<th>{escape(text)}</th>" for text in shown.headings if text)
    rows = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in shown.rows
    )
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in shown.remarks)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">{again}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(shown.title)}</title>
<style>:root {{ color-scheme: light dark; font: 16px system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 1rem auto; padding: 0 1rem; overflow-wrap: anywhere }}
div {{ overflow-x: auto }} th {{ text-align: left; font-weight: 600 }}
th, td {{ padding: .3rem .8rem .3rem 0; vertical-align: top }}</style></head>
<body><h1>{escape(shown.title)}</h1><ul>{remarks}</ul>
<div><table><tr>{head}</tr>{rows}</table></div></body></html>
"""
