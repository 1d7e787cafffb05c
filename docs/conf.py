"""Sphinx's settings; ``make docs`` writes the pages with ``pages.py``, then builds the site from
them.
"""

import importlib.util
import logging
import re
from importlib.metadata import version as version_of
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.application import Sphinx

logging.getLogger("alembic").setLevel(
    logging.WARNING
)  # which MLflow loads, and which lists its plugins
project = "deltafl"
author = "The deltafl authors"
version = release = version_of("deltafl")
project_copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"deltafl {version}"
html_show_sourcelink = html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db7ff", "color-brand-content": "#7db7ff"},
}
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebook is committed as it was executed, and a test executes it
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
autodoc_mock_imports = [
    name
    for name in ("torch", "scipy", "pandas", "sklearn")
    if importlib.util.find_spec(name) is None
]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
highlight_language = "text"  # of literal blocks, which are formulas
python_maximum_signature_line_length = 100
napoleon_custom_sections = [("Attributes", "params_style")]  # they are what is given
trim_doctest_flags = True


def _named(types: str) -> str:
    """Array types by the names that the code gives them, instead of what they stand for."""
    names = {"float64": "FloatArray", "float32": "Params", "int64": "IntArray", "bool": "BoolArray"}
    types = re.sub(r"~?[\w.]*\b_Buffer \|.*?\[complex \| bytes \| str\]", "ArrayLike", types)
    found = r"~?(?:numpy\.)?ndarray\[tuple\[.*?dtype\[~?(?:numpy\.)?(\w+)\]\]"
    return re.sub(found, lambda array: names.get(array[1], "ndarray"), types)


def _signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: Any,
    signature: str | None,
    result: str | None,
) -> tuple[str | None, str | None]:
    """Readable types; none on the page of a method, whose table has the options."""
    return "" if options.no_index else signature and _named(signature), result and _named(result)


def _attribute(app: Sphinx, domain: str, kind: str, content: nodes.Element) -> None:
    """The same for the types of attributes."""
    for types in content.parent.findall(addnodes.desc_annotation):
        text = types.astext()
        if _named(text) != text:
            types.clear()
            types.append(nodes.Text(_named(text)))


def _without_aliases(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """NamedTuple's own words on a field without a comment are no documentation."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def _literal_formulas(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Indented formulas of a docstring keep their lines: they become literal blocks."""
    for number in range(len(lines) - 1, 0, -1):
        before = next(
            (line for line in reversed(lines[:number]) if not line.startswith(" ") and line), ""
        )
        starts = lines[number].startswith("    ") and not lines[number - 1]
        if starts and not re.match(r"(\.\. |- |\d+\. |[A-Z]\w+:$)|.*::$", before):
            lines[number:number] = ["::", ""]


def _formula(translator: Any, node: nodes.Element) -> None:
    """A formula as MathML, which browsers draw themselves: nothing is asked of another host."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(
        convert(node.astext().replace(r"\mathrm", r"\operatorname"), display=display)
    )
    raise nodes.SkipNode


def _one_branch(
    app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None
) -> None:
    """Open the branch of the sidebar that the reader is in, and no other: the methods and the API
    are more than a hundred pages, and to list them beside each page was most of the build.
    """
    whole = context.get("toctree")
    if whole is not None:
        context["toctree"] = lambda **options: whole(**{**options, "collapse": True})


def setup(app: Sphinx) -> None:
    """Connect them."""
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.connect("autodoc-process-signature", _signature)
    app.connect("object-description-transform", _attribute)
    app.connect("autodoc-process-docstring", _literal_formulas, priority=400)  # before napoleon's
    app.connect("autodoc-process-docstring", _without_aliases)
    app.connect("html-page-context", _one_branch, priority=400)  # before the theme's
