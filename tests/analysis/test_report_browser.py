"""The report in a real browser: Chromium opens the file from the disk and a script clicks as a
person would.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafl.analysis import Summary, summarise
from deltafl.analysis.report import Part, write_report
from deltafl.simulation.view.live import Picture
from deltafl.simulation.view.live import page as watch_page
from deltafl.types import Judge
from tools.runs import runs_of

SAMPLERS: dict[str, Any] = {
    "full": [1, 2, 1],
    "uniform": [8, 9, 8],
    "census": [2, 3, 2],
    "balanced": [3, 3, 2],
    "innovation": [5, 4, 4],
    "pracdelta": [8, 8, 9],
    "fedavg": [9, None, 9],
}
RUNS = runs_of(**SAMPLERS)


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise(RUNS, 0.7)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, summary: Summary) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report([Part("digits", RUNS, summary, "deltafl compare")], path, "deltafl: digits")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing = "chromium and chromedriver are not installed (Debian: chromium, chromium-driver)"
        if os.environ.get("DELTAFL_NEEDS_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.set_script_timeout(30)
    yield browser
    browser.quit()


def show(browser: Any, page: Path, width: int = 1280, scheme: str = "light") -> None:
    """Open the page and wait until its figures are drawn."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())
    browser.execute_async_script(
        "const done = arguments[0], wait = () => document.body.dataset.ready ? done() : "
        "setTimeout(wait, 20); wait();"
    )


#: What the curves show: which samplers are on, the colour of each, the axes and the first numbers
#: of one.
STATE = """
const plot = Bokeh.documents[0].roots()[0];
const drawn = plot.renderers.filter((it) => it.glyph.type === "Line");
const of = (it) => Array.from(it.data_source.data[arguments[0]]);
return { on: drawn.filter((it) => it.visible).map((it) => it.name).sort(), x: plot.below[0].axis_label.text,
  colours: Object.fromEntries(drawn.map((it) => [it.name, it.glyph.line_color.value ?? it.glyph.line_color])),
  bands: plot.renderers.filter((it) => it.glyph.type === "VArea" && it.visible).length,
  y: plot.left[0].axis_label.text, scale: plot.y_scale.type,
  across: plot.x_scale.type,
  goal: plot.center.find((it) => it.type === "Span").visible,
  values: Object.fromEntries(drawn.map((it) => [it.name, of(it)])) };
"""


def state(browser: Any, column: str = "y") -> dict[str, Any]:
    found: dict[str, Any] = browser.execute_script(STATE, column)
    return found


def click(browser: Any, selector: str) -> None:
    browser.find_element("css selector", selector).click()


def choose(browser: Any, name: str, value: str) -> None:
    click(browser, f"select[name={name}] option[value='{value}']")


def test_nothing_leaves_the_page_and_the_console_is_quiet(browser: Any, page: Path) -> None:
    browser.get_log("performance"), browser.get_log("browser")
    show(browser, page)
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [
        it["params"]["request"]["url"]
        for it in messages
        if it["method"] == "Network.requestWillBeSent"
    ]
    assert sent[0] == page.as_uri()
    assert [url for url in sent[1:] if not url.startswith("data:")] == []
    assert [
        entry for entry in browser.get_log("browser") if entry["level"] in {"WARNING", "SEVERE"}
    ] == []


def test_the_numbers_on_the_page_are_those_of_the_summary(
    browser: Any, page: Path, summary: Summary
) -> None:
    show(browser, page)
    rows = browser.execute_script(
        "return [...document.querySelectorAll('.board tbody tr')].map((row) => "
        "[row.dataset.sampler,"
        " Object.fromEntries([...row.querySelectorAll('td')].map((cell) => [cell.dataset.name,"
        " [cell.dataset.value ?? null, cell.innerText]]))]);"
    )
    shown = dict(rows)
    for entry in summary.samplers:
        assert (
            entry.gap_closed is not None
            and entry.to_threshold is not None
            and entry.to_threshold.rounds is not None
        )
        value, text = shown[entry.sampler]["gap"]
        assert float(value) == entry.gap_closed.value and text.startswith(
            f"{entry.gap_closed.value:.2f}"
        )
        assert float(shown[entry.sampler]["rounds"][0]) == entry.to_threshold.rounds.mean
        assert float(shown[entry.sampler]["value"][0]) == entry.top5.mean
        drawn = state(browser)["values"][entry.sampler]
        runs = [run for run in RUNS if run.sampler == entry.sampler]
        assert drawn == pytest.approx(
            (100 * np.mean([run.accuracy_r for run in runs], axis=0)).tolist(), rel=1e-6
        )
    heading = browser.find_element("css selector", "h1").text
    assert heading.startswith(f"census closes {float(shown['census']['gap'][0]):.2f}")
    first = browser.execute_script(
        "return document.querySelector('.command').getBoundingClientRect().bottom"
    )
    assert first < 900  # the result, how sure it is, and the command are seen without scrolling
    table = (
        "const table = document.querySelector('.wide'); return table.scrollWidth - "
        "table.clientWidth"
    )
    assert browser.execute_script(table) == 0  # nor sideways


def test_rows_switch_samplers_and_six_are_in_colour(browser: Any, page: Path) -> None:
    show(browser, page)
    before = state(browser)
    assert before["on"] == sorted(SAMPLERS)
    weak = [name for name, colour in before["colours"].items() if colour == "#BDBDBD"]
    assert weak == ["fedavg"] and before["bands"] == 6
    legend = browser.find_element("css selector", ".legend").text.split()
    assert sorted(legend) == sorted({*SAMPLERS} - {"fedavg"})
    click(browser, 'tr[data-sampler="census"] label')
    after = state(browser)
    assert after["on"] == sorted({*SAMPLERS} - {"census"})
    assert after["colours"]["fedavg"] == "#000000" and after["bands"] == 6
    browser.find_element("css selector", 'tr[data-sampler="census"] input').send_keys(
        " "
    )  # by keyboard
    assert state(browser)["on"] == sorted(SAMPLERS)
    click(browser, "[data-switch=none]")
    assert state(browser)["on"] == []


def test_axes_change_what_is_drawn(browser: Any, page: Path) -> None:
    show(browser, page)
    assert (state(browser)["x"], state(browser)["scale"], state(browser)["goal"]) == (
        "rounds",
        "LinearScale",
        True,
    )
    choose(browser, "over", "bytes")
    assert state(browser)["x"] == "megabytes sent and received"
    assert state(browser, "x")["values"]["census"] == pytest.approx(
        [0.001 * (i + 1) for i in range(10)], rel=1e-6
    )
    choose(browser, "over", "seconds")
    assert state(browser, "x")["values"]["census"] == [2.0 * (i + 1) for i in range(10)]
    choose(browser, "metric", "loss")
    choose(browser, "scale", "log y")
    found = state(browser)
    assert (found["y"], found["scale"], found["goal"]) == ("test loss", "LogScale", False)
    choose(browser, "scale", "log x")
    assert (state(browser)["scale"], state(browser)["across"]) == ("LinearScale", "LogScale")
    assert found["values"]["census"][-1] == pytest.approx(0.1, rel=1e-6)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_pointer_on_a_curve_shows_its_values(browser: Any, page: Path) -> None:
    show(browser, page)
    canvas = browser.find_element("css selector", "[data-figure=curves]")
    browser.execute_script("arguments[0].scrollIntoView()", canvas)
    place = """
const plot = Bokeh.documents[0].roots()[0], view = Bokeh.index.find_one(plot), data = view.model.renderers;
const line = data.filter((it) => it.name === "census" && it.glyph.type === "Line")[0].data_source.data;
const box = view.el.getBoundingClientRect(), frame = view.frame;
return [box.x + frame.x_scale.compute(line.x[5]), box.y + frame.y_scale.compute(line.y[5])];
"""
    x, y = browser.execute_script(place)
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
    text = """
const under = (it) => [it, ...(it.shadowRoot ? all(it.shadowRoot) : [])];
const all = (root) => [...root.querySelectorAll("*")].flatMap(under);
return all(document).filter((it) => it.className === "bk-tooltip-row-value").map((it) => it.textContent);
"""
    shown = [value.strip() for value in browser.execute_script(text)]
    at = shown.index("census")
    assert shown[at : at + 4] == [
        "census",
        "6",
        "80",
        "80 to 80",
    ]  # its name, round, mean, lowest and highest


def test_the_table_sorts_and_filters(browser: Any, page: Path) -> None:
    show(browser, page)

    def order() -> list[str]:
        script = (
            "return [...document.querySelectorAll('.board tbody tr')].filter((row) => !row.hidden)"
        )
        names: list[str] = browser.execute_script(f"{script}.map((row) => row.dataset.sampler)")
        return names

    assert order()[:3] == ["full", "census", "balanced"]
    click(browser, "thead th:first-child button")
    assert order() == sorted(SAMPLERS, reverse=True)
    click(browser, "thead th:first-child button")
    assert order() == sorted(SAMPLERS)
    browser.find_element("css selector", "[type=search]").send_keys("fed")
    assert order() == ["fedavg"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_telephone_shows_it_without_scrolling_sideways(
    browser: Any, page: Path, scheme: str
) -> None:
    show(browser, page, width=400, scheme=scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 400
    colours = state(browser)["colours"]
    assert (colours["uniform"], colours["census"]) == {
        "light": ("#000000", "#0072B2"),
        "dark": ("#F4F4F4", "#4C9AE6"),
    }[scheme]


def test_names_are_text_in_the_page_and_in_its_figures(browser: Any, tmp_path: Path) -> None:
    metric = "</script><b id=evil>$$x$$"
    values = np.linspace(0, 1, 10)
    runs = [
        run._replace(
            sampler=f"<b id=evil>{run.sampler}$$x$$",
            metric=metric,
            others_r={metric: values},
            judges=[Judge(metric)],
        )
        for run in runs_of(full=[1, 2], uniform=[8, 9])
    ]
    page = tmp_path / "report.html"
    write_report([Part("<b id=evil>", runs, summarise(runs, 0.5))], page, "<b id=evil>")
    show(browser, page)
    choose(browser, "over", "bytes")
    # Over the middle of the curves, where the pointer shows their names.
    figure = browser.find_element("css selector", "[data-figure=curves]")
    webdriver = pytest.importorskip("selenium.webdriver")
    webdriver.ActionChains(browser).move_to_element(figure).perform()
    assert browser.execute_script("return document.getElementById('evil')") is None
    assert state(browser)["y"] == f"test {metric}"


def test_the_page_of_watch_shows_what_is_new_by_itself(browser: Any, tmp_path: Path) -> None:
    exceptions = pytest.importorskip("selenium.common.exceptions")
    file = tmp_path / "watch.html"

    def shown(text: str) -> str:
        body = ""
        for _ in range(200):
            # A question in the moment in which the page is replaced has no answer.
            with suppress(exceptions.WebDriverException):
                body = browser.execute_script("return document.body.innerText")
            if text in body:
                break
            time.sleep(0.05)
        return body

    before = Picture("<b id=evil>", ("", ""), [("round", "1 of 2")], ["<i>careful"], False)
    file.write_text(watch_page(before, 2.0))
    browser.get(file.as_uri())
    assert "1 of 2" in shown("1 of 2")
    file.write_text(watch_page(before._replace(rows=[("round", "2 of 2")], is_over=True), 2.0))
    body = shown("2 of 2")
    assert "2 of 2" in body
    assert "<i>careful" in body
    assert browser.execute_script("return document.getElementById('evil')") is None
    # On a narrow screen nothing is cut off.
    size = {"width": 360, "height": 700, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
