"""What is to be seen of a run, a comparison or a federation while it goes on: ``deltafl watch``.

``seen.py`` reads the folder, ``foreseen.py`` that of a plan.
"""

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...analysis.text import human_amount
from ...errors import DeltaflError, counted, printable
from ...federation.saved import FILES
from ...store.files import below
from ...types import Array, Json, Judge, judge_of
from ..folder.directory import COMPARED, began_by, recorded_settings
from ..folder.lines import refused
from ..folder.record import first_judge
from .foreseen import Foreseen, Row, Use
from .seen import COUNTS, Seen, run_at, state_at

#: Rounds after which it means something that a client was never there or never selected.
_ENOUGH = 5
#: The n of a label.
_SAMPLE = r"\+sample=(\d+)"
_BARS = "▁▂▃▄▅▆▇█"
#: Points of a curve.
_WIDTH = 24


class Picture(NamedTuple):
    """What is shown, in a terminal or as a page."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str]  #: warnings, and how runs ended
    is_over: bool


def picture(place: Path, foreseen: Foreseen | None = None) -> Picture:
    """What is to be seen in a folder, or in a file of a state, now, beside what a plan foresaw.

    Raises:
        DeltaflError: If there is no run, comparison, federation or state, or one is damaged.
    """
    state = place if place.is_file() else place / FILES[0]
    if state.exists():
        return _alone(state_at(state), foreseen)
    found = recorded_settings(place) if place.is_dir() else None
    if found is None:
        raise DeltaflError(
            f"{place} holds no run, comparison or federation: name the --out of deltafl run or "
            "compare, the state_path of a federation, or a file of save_state"
        )
    if began_by(found) == "tune":
        compared = place / COMPARED
        if compared.is_dir():
            return picture(compared, foreseen)
        raise DeltaflError(
            f"{place} holds the tuning runs of deltafl tune, which shows their progress itself: "
            f"watch {compared} once it is there"
        )
    total = found.get("rounds")
    task = found.get("task")
    # The same file may be named from another folder.
    if foreseen is not None and task and Path(task).name != Path(foreseen.task).name:
        raise DeltaflError(
            f"the plan is for the task {foreseen.task!r}, and {place} is of {task!r}: name a plan "
            "for that task"
        )
    if "samplers" not in found:
        method = found.get("sampler", place.name)
        return _alone(run_at(place, method, found, total), foreseen)
    runs = []
    for folder in sorted(below(place, "runs").glob("*")):
        if not folder.is_dir():
            continue
        runs.append(_one_of_many(folder, total or 0)._replace(foreseen=foreseen))
    # Runs that have not begun have no folder.
    planned = len(found["samplers"]) * len(found.get("seeds", [0]))
    return _side_by_side(printable(place), runs, max(planned, len(runs)))


def _one_of_many(folder: Path, rounds: int) -> Seen:
    """A run of a comparison; one with damaged files says so, and the others are still seen."""
    try:
        own = recorded_settings(folder) or {}
        # Those of a pilot go on beyond what it began with, and it has more of them.
        rounds = max(rounds, own.get("rounds", 0))
        return run_at(folder, folder.name, own, rounds or None)
    except DeltaflError as error:
        return Seen(printable(folder.name, limit=60), (), None, {}, None, fault=str(error))


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


def _metrics(seen: Seen) -> Iterator[tuple[str, str]]:
    """Metrics on the test set, and else the clients' own loss."""
    tested = [line["test"] for line in seen.lines if "test" in line]
    judge = first_judge(seen.lines)
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


def _facts(seen: Seen) -> dict[str, str]:
    """What is shown of one run, by name; nothing of one that cannot be read."""
    if seen.fault:
        return {}
    last = seen.last
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
    reasons = refused(seen.lines)
    facts["replies refused"] = "none"
    if reasons:
        texts = [f"{number} x {why}" for why, number in reasons.most_common(3)]
        facts["replies refused"] = "; ".join(texts)
    use = _use(seen)
    facts["cost so far"] = use.text
    if seen.foreseen is not None:
        spent = human_amount(use.cost(seen.foreseen.prices))
        facts["cost planned"] = f"{spent} of {_planned(seen, seen.foreseen)}"
    if seen.age is not None:
        facts["last written"] = f"{seen.age:.0f} s ago"
    return facts


def _error(line: Json) -> str:
    """The standard deviation of the estimate over draws, in lengths of the estimate."""
    variance, length = line.get("variance"), line.get("estimate_norm")
    if variance is None or not length:
        return "unknown"
    return f"{max(variance, 0) ** 0.5 / length:.0%} of its length"


def _never_selected(seen: Seen) -> tuple[int, int]:
    """How many clients were never selected, and how many there are; (0, 0) if nobody knows."""
    if not seen.counts:
        return 0, 0
    selected_m = seen.counts[COUNTS[0]] > 0
    # Lines are newer than the last checkpoint; where clients come and go they have no names.
    if not seen.counts[COUNTS[3]].size:
        for line in seen.lines:
            known = [client for client in line.get("cohort", ()) if client < len(selected_m)]
            selected_m[known] = True
    return int((~selected_m).sum()), len(selected_m)


def _there(seen: Seen) -> tuple[Array, Array]:
    """For how many rounds each client has been known, and in how many it was not there."""
    missed_m, joined_m = seen.counts[COUNTS[2]], seen.counts[COUNTS[3]]
    known_m = np.full(len(missed_m), int(seen.counts["state.round"]))
    return known_m - (joined_m if joined_m.size else 0), missed_m


def _without_clients(strata: Sequence[str], is_there_m: Array) -> list[str]:
    """The strata of which no client is there, by name."""
    # A folder of somebody else's may have a stratum for more clients than there are.
    if len(strata) != len(is_there_m):
        return []
    there = {stratum for stratum, is_there in zip(strata, is_there_m, strict=True) if is_there}
    return [printable(repr(name), limit=60) for name in dict.fromkeys(strata) if name not in there]


def _rates(seen: Seen) -> dict[str, float | None]:
    """Which share of the selected replied, and which share of the clients was there."""
    if not seen.counts:
        return {}
    selected, responded = (int(seen.counts[name].sum()) for name in COUNTS[:2])
    known_m, missed_m = _there(seen)
    return {
        "response rate": responded / selected if selected else None,
        "availability": 1 - missed_m.sum() / known_m.sum() if known_m.sum() > 0 else None,
    }


def _use(seen: Seen) -> Use:
    """What was used so far."""
    use = Use.of(seen.lines)
    if not seen.counts:
        return use
    # A file of a state has no lines; it counts no client that was forgotten.
    selected = int(seen.counts[COUNTS[0]].sum())
    return use._replace(trainings=max(use.trainings, selected))


def _row(seen: Seen, foreseen: Foreseen) -> Row:
    """What the plan foresaw for what is played."""
    # A plan has n beside its methods.
    method = re.sub(_SAMPLE, "", seen.method)
    # Who was selected last may be more, or fewer: a census, clients that were away.
    n = seen.n or seen.last.get("num_selected", 0)
    if own := re.search(_SAMPLE, seen.method):
        n = int(own[1])
    return foreseen.row(method, n)


def _planned(seen: Seen, foreseen: Foreseen) -> str:
    """The cost that the plan foresaw for what is played, and for what it said so."""
    row = _row(seen, foreseen)
    cost = human_amount(row["cost"])
    if row["cost_low"] is not None and row["cost_high"] is not None:
        cost += f" [{human_amount(row['cost_low'])}, {human_amount(row['cost_high'])}]"
    method = printable(row["method"], limit=60)
    goal = _judge(seen, foreseen).text(foreseen.goal)
    return f"{cost} to {goal} with {method}, n = {row['n']}"


def _judge(seen: Seen, foreseen: Foreseen) -> Judge:
    """The metric of the plan's goal, which need not be the first one of what is watched."""
    return foreseen.judge or first_judge(seen.lines)


def _is_over(seen: Seen) -> bool:
    ended = {"stopped", "diverged"} & seen.last.keys()
    return bool(ended) or (seen.total is not None and seen.last["round"] >= seen.total)


def _of_weights(seen: Seen) -> Iterator[str]:
    """Whether the last estimate depends on few clients."""
    n = seen.last.get("num_selected", 0)
    heaviest, size = seen.last.get("largest_weight"), seen.last.get("effective_sample_size")
    if n > 1 and heaviest is not None and heaviest > 0.5:
        yield f"The estimate depends on one client: its weight is {heaviest:.2f}."
    elif n > 1 and size is not None and 0 < size < n / 3:
        yield f"The estimate depends on few clients: {n} count like {size:.1f}."


def _of_clients(seen: Seen) -> Iterator[str]:
    """Who was never selected, or never there."""
    n = seen.last.get("num_selected", 0)
    never, m = _never_selected(seen)
    if n and never and seen.last["round"] * n >= _ENOUGH * m:
        rounds = counted(seen.last["round"], "round")
        yield f"{never} of {m} clients were never selected in {rounds}."
    if not seen.counts:
        return
    known_m, missed_m = _there(seen)
    is_away_m = (known_m >= _ENOUGH) & (missed_m >= known_m)
    away = int(is_away_m.sum())
    if away:
        yield f"{away} of {m} clients were never there: the model learns nothing from them."
    for name in _without_clients(seen.strata, ~is_away_m):
        yield f"Nobody of stratum {name} was ever there: the model learns nothing from it."


def _of_replies(seen: Seen) -> Iterator[str]:
    """Whether most replies are missing."""
    rate = _rates(seen).get("response rate")
    if rate is not None and rate < 0.5:
        yield f"Only {rate:.0%} of the selected clients have replied."
    n = seen.last.get("num_selected", 0)
    if n and len(seen.last.get("rejected", ())) >= n:
        yield f"All replies of round {seen.last['round']} were refused or missing."


def _of_plan(seen: Seen) -> Iterator[str]:
    """Whether the goal is reached, and at what cost; else whether more was spent than foreseen."""
    foreseen = seen.foreseen
    if foreseen is None:
        return
    judge = _judge(seen, foreseen)
    goal = judge.text(foreseen.goal)
    tested = [line["test"] for line in seen.lines if "test" in line]
    if tested and not any(judge.name in test for test in tested):
        yield f"The goal of the plan, {goal}, is of {judge.heading}, which is not measured here."
    for at, line in enumerate(seen.lines, 1):
        value = line.get("test", {}).get(judge.name)
        if value is not None and judge.sign * value >= judge.sign * foreseen.goal:
            cost = human_amount(Use.of(seen.lines[:at]).cost(foreseen.prices))
            yield f"{goal} was reached in round {line['round']}, at a cost of {cost}."
            return
    row = _row(seen, foreseen)
    spent = _use(seen).cost(foreseen.prices)
    if spent > (row["cost_high"] or row["cost"]):
        yield f"The cost so far is more than the plan foresaw for all of the way to {goal}."


def _of_end(seen: Seen) -> Iterator[str]:
    """How it ended, or why that cannot be read."""
    if seen.fault:
        yield f"Cannot be read: {seen.fault}."
    last = seen.last
    for entry, text in (("diverged", "Diverged"), ("suspect", "Its end is suspect")):
        if entry in last:
            yield f"{text} in round {last['round']}: {printable(last[entry]['why'], limit=300)}."
    if "stopped" in last:
        yield f"Stopped in round {last['round']}: {printable(last['stopped'], limit=300)}."
    elif _is_over(seen) and "diverged" not in last:
        yield f"Finished: {counted(last['round'], 'round is', 'rounds are')} played."


#: What is remarked on, in this order.
_REMARKS = (_of_weights, _of_clients, _of_replies, _of_plan, _of_end)


def _remarks(seen: Seen) -> list[str]:
    """Warnings in words, and how it ended."""
    return [text for remark in _REMARKS for text in remark(seen)]


def _alone(seen: Seen, foreseen: Foreseen | None) -> Picture:
    seen = seen._replace(foreseen=foreseen)
    return Picture(seen.name, ("", ""), [*_facts(seen).items()], _remarks(seen), _is_over(seen))


def _side_by_side(name: str, runs: Sequence[Seen], planned: int) -> Picture:
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
