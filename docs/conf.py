"""Sphinx's settings: pages in Markdown, the API from docstrings. `nox -s docs` builds the site in docs/_build."""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from typing import Any

project = "logitless"
author = "The logitless authors"
release = version_of("logitless")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"logitless {release}"
html_show_sourcelink = False
html_show_copyright = False
maximum_signature_line_length = 90
highlight_language = "none"  # a plain fence is a formula or a command's output
myst_heading_anchors = 3

default_role = "code"  # docstrings put code in single backticks, as Markdown does
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # object's own of __call__ say nothing
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# With -n a name of ours in a signature must have a place here, unless it is private or a type variable.
nitpick_ignore_regex = [("py:.*", r"(?!logitless).*"), ("py:.*", r"logitless.*\.(_\w+(\.\w+)*|[A-Z]|Model|Trainer)")]

CODE = re.compile(r"(`[^`]*`)")


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings as reStructuredText: `|x|` is a magnitude, `*` a product, and what a module indents is code."""
    for i, line in enumerate(lines):
        parts = CODE.split(line)
        parts[::2] = [re.sub(r"(?<!^)[|*]", r"\\\g<0>", part) for part in parts[::2]]
        lines[i] = "".join(parts)
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment: napoleon takes a first line's words before a colon for a type
    if what == "module":
        starts = [i for i in range(2, len(lines)) if lines[i].startswith("    ") and lines[i - 2][:1].strip()]
        for i in reversed(starts):
            lines[i:i] = ["::", ""]


def setup(app: Any) -> None:
    """Before napoleon, whose own stars are meant."""
    app.connect("autodoc-process-docstring", as_rst, priority=400)
