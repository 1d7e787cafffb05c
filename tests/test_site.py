"""The site's pages are made from what is in the repository; examples in docstrings and in the
page of concepts run.
"""

import contextlib
import doctest
import importlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deltafl.samplers import SAMPLERS, is_unbiased

ROOT = Path(__file__).parent.parent
WITH_EXAMPLES = sorted(path for path in (ROOT / "src").rglob("*.py") if ">>> " in path.read_text())


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "pages"
    subprocess.run([sys.executable, str(ROOT / "docs" / "pages.py"), str(out)], check=True)
    return out


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_run(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT / "src").with_suffix("").parts))
    failed, _ = doctest.testmod(module)
    assert failed == 0


def test_the_example_of_the_concepts_prints_what_it_says() -> None:
    code = (
        (ROOT / "docs" / "tutorial" / "concepts.md")
        .read_text()
        .partition("```python\n")[2]
        .partition("```")[0]
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/tutorial/concepts.md", "exec"), {})
    assert printed.getvalue().strip() == code.rpartition("# ")[2].strip()


def test_every_link_of_the_pages_leads_to_a_page_or_a_file(pages: Path) -> None:
    links = 0
    for page in pages.rglob("*.md"):
        if pages / "files" not in page.parents:
            for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", page.read_text()):
                links += "://" not in target
                assert "://" in target or (page.parent / target).exists(), (
                    f"{page.name} links to {target}"
                )
    assert links > 150
    assert (ROOT / "examples" / "own_sampler.py").read_text() in (
        pages / "files/examples/own_sampler.py.md"
    ).read_text()
    assert "](results/demo/accuracy.png)" in (pages / "index.md").read_text()


def test_a_method_has_a_page_with_the_numbers_of_the_benchmark(pages: Path) -> None:
    index = (pages / "methods" / "index.md").read_text()
    shown = re.search(
        r"^\| `balanced` \| .*? \| (.*?) \|",
        (ROOT / "docs/why/evidence.md").read_text(),
        re.MULTILINE,
    )
    assert shown is not None
    for name in SAMPLERS:
        text = (pages / "methods" / f"{name}.md").read_text()
        assert f"| [`{name}`]({name}.md) | {'yes' if is_unbiased(name) else '**no**'} |" in index
        assert text.startswith(f"# {name}\n")
    assert (
        f"| digits | `balanced` | {shown[1]} | better |"
        in (pages / "methods" / "balanced.md").read_text()
    )
    assert "| worse |" in (pages / "methods" / "power-of-choice.md").read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("text", "words"), [("[x](nowhere.md) [x](#nothing)", {"nowhere.md", "nothing"}), ("ok", set())]
)
def test_a_link_that_leads_nowhere_fails_the_build(
    tmp_path: Path, text: str, words: set[str]
) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text(f"# Title\n\n{text}\n")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", str(ROOT / "docs")]
    done = subprocess.run(
        [*build, str(tmp_path / "pages"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == bool(words), done.stderr
    assert all(word in done.stderr for word in words)
