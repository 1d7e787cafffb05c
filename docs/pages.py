"""Writes the pages of the site into a folder: ``python docs/pages.py build/pages``, which
``make docs`` does.

They are the documents of the repository, with links that work on the site, the source files that
they link to, a page for each method and one for each package of the API.
"""

import csv
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path, PurePosixPath

import deltafl
from deltafl.designs.table import DESIGNS
from deltafl.estimators.table import ALL_ESTIMATORS
from deltafl.samplers import is_unbiased
from deltafl.samplers.table import NEEDS, SAMPLERS, SamplerEntry

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".cff": "yaml"}
#: Put above a page that only links lead to.
ORPHAN = "---\norphan: true\n---\n\n"
#: The pages of the API: their titles, and the names of a package that ``deltafl`` itself does not
#: have.
PACKAGES = {
    "round": ("The round", ""),
    "samplers": ("Samplers", "SamplerEntry parse_label label_of"),
    "designs": ("Designs", "every_cohort"),
    "estimators": ("Estimators and control variates", ""),
    "server": ("Server: optimizers and privacy", ""),
    "simulation": ("Comparisons and runs", "RoundDone tracker export_model"),
    "analysis": (
        "Recommendation and summaries",
        "Recommendation Evidence read_summary write_summary",
    ),
    "tasks": (
        "Tasks",
        "Task Dataset make_task table_task from_huggingface from_torch register check_task "
        "make_partition",
    ),
    "audit": (
        "Audit: is a sampler unbiased?",
        "check_sampler audit estimate_error lower_bound least_mse",
    ),
    "scale": ("Saved states", ""),
    "flower": ("Flower", "DeltaStrategy delta_mod LocalSteps register"),
    "nvflare": ("NVFlare", "DeltaFedAvg DeltaClient"),
}


class Documents:
    """The documents that have been written, and the files that they ask for by linking to them."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.placed: dict[Path, PurePosixPath] = {}

    def place(self, source: Path) -> PurePosixPath:
        """Where a file of the repository is on the site; it is written there when it is asked
        for first.
        """
        if source.is_dir():
            source /= "README.md"
        if source == ROOT / "README.md":
            source = ROOT / "docs" / "index.md"
        if source not in self.placed:
            path = PurePosixPath(source.relative_to(ROOT))
            if path.suffix in LANGUAGES:
                path = PurePosixPath("files", f"{path}.md")
            elif path.parts[0] == "docs":
                path = PurePosixPath(*path.parts[1:])
            self.placed[source] = path
            (self.out / path).parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in {".md", ".ipynb"}:
                (self.out / path).write_text(self.page(source, path), encoding="utf-8")
            else:
                shutil.copyfile(source, self.out / path)
        return self.placed[source]

    def page(self, source: Path, path: PurePosixPath) -> str:
        """A file as a page: a document with the site's links, or the code of a source file."""
        text = source.read_text(encoding="utf-8")
        if source.suffix in LANGUAGES:
            code = f"`````{LANGUAGES[source.suffix]}\n{text}`````"
            return f"{ORPHAN}# {source.relative_to(ROOT)}\n\n{code}\n"
        text = self.linked(text, source.parent, path)
        if source == ROOT / "results" / "README.md":
            pages = [
                *dict.fromkeys(re.findall(r"\]\(([\w-]+/README)\.md\)", text)),
                # Pages of one page, such as those of another task.
                *sorted(
                    page.relative_to(source.parent).with_suffix("").as_posix()
                    for page in source.parent.glob("*/*/README.md")
                ),
            ]  # as the index has them
            text += "\n```{toctree}\n:hidden:\n" + "\n".join(pages) + "\n```\n"
        elif source.name == "index.md" and source.parent.parent.parent == ROOT / "docs":
            pages = re.findall(r"^- \[.*\]\(([\w-]+)\.md\)", text, re.MULTILINE)
            text += "\n```{toctree}\n:hidden:\n" + "\n".join(pages) + "\n```\n"
        elif source.parts[len(ROOT.parts)] not in {"docs", "results"}:
            text = ORPHAN + text
        if (
            "<!-- README -->" in text
        ):  # all of it but its list of links, which the site has at the side
            readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## More\n")[0]
            text = text.replace("<!-- README -->", self.linked(readme, ROOT, path))
        return text

    def linked(self, text: str, folder: Path, path: PurePosixPath) -> str:
        """A text of a folder with links for the page at a path; Sphinx complains about those
        that lead nowhere.
        """

        def link(found: re.Match[str]) -> str:
            source = (folder / found[1]).resolve()
            if "://" in found[1] or not source.exists():
                return found[0]
            return f"]({os.path.relpath(self.place(source), path.parent)}{found[2] or ''})"

        return LINK.sub(link, text)


def method_page(entry: SamplerEntry, measured: list[list[str]], costs: str) -> str:
    """The page of a method: what it does, what it needs, what it costs, what was measured."""
    name = entry.name
    kind = f"{entry.kind.__module__}.{entry.kind.__name__}"
    default = {field.name: field.default for field in fields(entry.kind)}  # type: ignore[arg-type]
    variant = ", ".join(f"{key}={value}" for key, value in entry.fixed.items())
    others = ", ".join(f"`{name}@{other}`" for other in DESIGNS if other != entry.design)
    facts = {
        "unbiased": yes(is_unbiased(entry.name)),
        "what the server must know": NEEDS[entry.needs],
        "costs": costs,
        "design": f"`{entry.design}`; others: {others}" if entry.design else "its own",
        "estimator": f"`{entry.estimator}`; another: `{name}@@ESTIMATOR`",
        "options": ", ".join(f"`{option}={default[option]!r}`" for option in entry.options)
        or "none",
        "fixed": f"`{variant}`" if variant else "nothing",
        "source": f"{entry.source} ([references](../reference/references.md))",
    }
    heads = ("task", "label", "gap closed [95 %]", "against uniform sampling", "local rate")
    text = (ROOT / "docs" / "templates" / "method.txt").read_text(encoding="utf-8")
    return text.format(
        name=name, kind=kind, facts=table(("", ""), facts.items()), measured=table(heads, measured)
    )


def yes(true: bool) -> str:
    """A word of a table."""
    return "yes" if true else "**no**"


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows])


def measured_row(row: dict[str, str], title: str) -> list[str]:
    """What the benchmark measured of a method on a task, and what the interval decides."""
    numbers = [row[f"gap_mean_accuracy{end}"] for end in ("", "_low", "_high")]
    gap = "{:.2f} [{:.2f}, {:.2f}]".format(*map(float, numbers)) if all(numbers) else "-"
    low, high = (float(row[f"mean_accuracy_to_uniform_{end}"] or 0) for end in ("low", "high"))
    verdict = "better" if low > 0 else "worse" if high < 0 else "not decided"
    return [title, f"`{row['method']}`", gap, verdict, row["rate"]]


def costs_of(entry: SamplerEntry, row: dict[str, str], uniform: dict[str, str]) -> str:
    """What the server keeps and what clients send, by a method's and by uniform sampling's row
    of the benchmark.
    """
    census = entry.make({}).census
    sent = (
        f"every client sends {census.size + 1} numbers once, after the work of a round; "
        if census
        else ""
    )
    times = (
        f"{float(row['mb_a_round']) / float(uniform['mb_a_round']):.2g} times the traffic of "
        "uniform sampling"
    )
    traffic = "the traffic of uniform sampling" if times.startswith("1 ") else times
    models = "1 model" if row["models"] == "1" else f"{row['models']} models"
    kept = f"the server keeps {models} and {float(row['numbers_a_client']):.0f} numbers a client"
    return f"{sent}{kept}; {traffic} (digits, 10 of 100 clients a round)"


def write_methods(folder: Path) -> None:
    """A page for each row of the table of samplers, and the tables of what there is."""
    folder.mkdir()
    parts = tomllib.loads(
        (ROOT / "reproduction" / "files" / "benchmark.toml").read_text(encoding="utf-8")
    )["parts"]
    measured: dict[str, list[list[str]]] = {name: [] for name in SAMPLERS}
    on_digits: dict[str, dict[str, str]] = {}
    with (ROOT / "results" / "benchmark" / "table.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["part"] == "digits":
                on_digits[row["method"]] = row
            measured[re.split(r"[@(+]", row["method"])[0]].append(
                measured_row(row, parts[row["part"]]["title"])
            )
    samplers = []
    for name, entry in SAMPLERS.items():
        costs = (
            costs_of(entry, on_digits[name], on_digits["uniform"])
            if name in on_digits
            else "not measured"
        )
        (folder / f"{name}.md").write_text(
            method_page(entry, measured[name], costs), encoding="utf-8"
        )
        gap = next((line[2] for line in measured[name] if line[1] == f"`{name}`"), "-")
        samplers.append(
            (f"[`{name}`]({name}.md)", yes(is_unbiased(entry.name)), entry.needs, gap, entry.source)
        )
    page = (ROOT / "docs" / "templates" / "methods.txt").read_text(encoding="utf-8")
    heads = (
        "method",
        "unbiased",
        "needs",
        f"gap closed on {measured['full'][0][0]} [95 %]",
        "source",
    )
    designs = [(f"`{d.name}`", yes(d.exact), d.kind, d.source or "-") for d in DESIGNS.values()]
    estimators = [
        (f"`{e.name}`", yes(e.unbiased), e.source or "-") for e in ALL_ESTIMATORS.values()
    ]
    text = page.format(
        samplers=table(heads, samplers),
        needs=table(("needs", "what the server must know"), NEEDS.items()),
        designs=table(("design", "exact", "cohort", "source"), designs),
        estimators=table(("estimator", "unbiased", "source"), estimators),
        names="\n".join(SAMPLERS),
    )
    (folder / "index.md").write_text(text, encoding="utf-8")


def write_api(folder: Path) -> None:
    """A page for each package, with what ``deltafl`` has of it and the names above."""
    folder.mkdir()
    of_package: dict[str, list[str]] = {package: [] for package in PACKAGES}
    for name in deltafl.__all__:
        package = deltafl._MODULES[name].split(".")[1]
        of_package[package if package in PACKAGES else "round"].append(f"deltafl.{name}")
    for package, (title, others) in PACKAGES.items():
        names = [*of_package[package], *(f"deltafl.{package}.{name}" for name in others.split())]
        text = f"# {title}\n\n```{{eval-rst}}\n{''.join(map(directive, names))}```\n"
        (folder / f"{package}.md").write_text(text, encoding="utf-8")
    index = "# API\n\n```{toctree}\n:maxdepth: 2\n" + "\n".join(PACKAGES) + "\n```\n"
    (folder / "index.md").write_text(index, encoding="utf-8")


def directive(name: str) -> str:
    """What documents a name, by its case; tables in capitals are on the page of methods."""
    last = name.rpartition(".")[2]
    if last.isupper():
        return ""
    return (
        f".. autoclass:: {name}\n   :members:\n\n"
        if last[0].isupper()
        else f".. autofunction:: {name}\n\n"
    )


if __name__ == "__main__":
    out = Path(sys.argv[1]).resolve()
    shutil.rmtree(out, ignore_errors=True)
    documents = Documents(out)
    for pattern in ("docs/**/*.md", "docs/**/*.ipynb", "results/**/README.md"):
        for source in sorted(ROOT.glob(pattern)):
            documents.place(source)
    write_methods(out / "methods")
    write_api(out / "api")
