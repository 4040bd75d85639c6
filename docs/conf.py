"""How Sphinx makes the site: ``scripts/docs`` runs it, offline and with warnings as errors."""

import ast
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT)]

import supported_layers  # noqa: E402

import torch_dpbayes  # noqa: E402


def files() -> str:
    """Every file of the package with the first paragraph of its docstring, room by room."""
    lines = []
    package = ROOT / "torch_dpbayes"
    for path in sorted(package.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        says = ast.get_docstring(ast.parse(path.read_text())) or ""
        says = " ".join(re.sub(r":\w+:`~?(\S+)`", r"``\1``", says.split("\n\n")[0]).split())
        name = path.relative_to(package).as_posix()
        lines.append(f"* `{name}`: {says.replace('``', '`')}")
    return "\n".join(lines)


project = "torch_dpbayes"
version = release = torch_dpbayes.__version__
html_title = f"torch_dpbayes {release}"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_js_files = ["copy.js"]
html_math_renderer = "mathml"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_static"]
suppress_warnings = ["myst-nb.lexer"]

myst_enable_extensions = ["dollarmath", "substitution"]
myst_heading_anchors = 4
myst_substitutions = {"supported_layers": supported_layers.table(), "files": files()}
nb_execution_mode = "off"  # notebooks keep their outputs, which the slow tests make anew

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_mock_imports = ["lightning", "transformers"]  # of the extra [frameworks]
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields of named tuples are documented once


def mathml(node: nodes.Node, *, as_block: bool = False) -> str:
    """MathML of a formula, without LaTeX's sizes of brackets: those of MathML stretch."""
    text = re.sub(r"\\[bB]igg?[lr]?(?![A-Za-z])", "", node.astext()).replace(r"\dots", r"\ldots")
    made: str = tex2mathml(text, as_block=as_block)
    return made


def inline_formula(translator: Any, node: nodes.math) -> None:
    translator.body.append(mathml(node))
    raise nodes.SkipNode


def formula(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="formula">{mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def letters_are_no_numbers(*event: Any) -> None:
    """``temperature: T. 0 turns …`` is no item T of a list."""
    lines = event[-1]
    lines[:] = [re.sub(r"^(\s*(?:\w+: )?[A-Za-z])\.(?=\s|$)", r"\1\\.", line) for line in lines]


def keep_together(app: Any, tree: nodes.document, docname: str) -> None:
    """No line ends between a number and its error or unit: ``0.5 ± 0.1``, ``5 %``."""
    for text in list(tree.findall(nodes.Text)):
        if not isinstance(text.parent, nodes.literal | nodes.literal_block):
            kept = re.sub(r"(?<=[\d.]) (?=[±%])|(?<=±) ", "\N{NO-BREAK SPACE}", text)
            text.parent.replace(text, nodes.Text(kept))


def setup(app: Any) -> None:
    app.connect("doctree-resolved", keep_together)
    app.connect("autodoc-process-docstring", letters_are_no_numbers, priority=1)  # before napoleon
    # Browsers draw MathML themselves: MathJax would be a script from elsewhere.
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
