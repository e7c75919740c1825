"""Configuration of the documentation site, which `python -m tools.site` builds."""

import sys
from pathlib import Path

from sphinx.domains.python import PyObject

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools import site

project = "ligerzoo"
author = "The ligerzoo authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = "ligerzoo"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False

smartquotes = False  # "--method" and "auto" stay as they are typed

myst_heading_anchors = 4  # as in GitHub's links

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # no texts of torch
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

next(field for field in PyObject.doc_field_types if field.name == "variable").label = "Attributes"


def setup(app):
    app.connect("autodoc-process-docstring", site.to_restructured_text, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", site.readable_signature)
    app.connect("autodoc-skip-member", site.skip_member)
    app.connect("doctree-read", site.exact_references)
    app.connect("doctree-read", site.en_dashes)
    app.connect("missing-reference", site.public_reference)
