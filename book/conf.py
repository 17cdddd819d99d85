"""The book: settings of Sphinx. `make book` runs it over the root of the repository."""

import os
import sys
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import pages  # noqa: E402

pages.write(HERE)

project, author, copyright = "minipar", "The minipar authors", "the minipar authors"
extensions = ["myst_nb"]
root_doc = "book/index"
include_patterns = ["book/**.md", "notebooks/*.ipynb", "notebooks/README.md", "tests/TRAPS.md"]
exclude_patterns = [".*", "build", "runs", "minipar", "notebooks/solutions", "**/.*"]
nitpicky = True

# Notebooks are shown as they were committed, never run.
nb_execution_mode = "off"
nb_custom_formats = {".ipynb": ["pages.read_notebook", {}, False]}
nb_merge_streams = True
nb_render_error_lexer = "myst-ansi"  # messages of checks are no Python
nb_ipywidgets_js = {}  # else pages with widgets fetch scripts
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

# A page needs nothing but itself: formulas are typeset by a script that lies beside it.
mathjax_path = "mathjax/tex-svg.js"
html_static_path = ["static", str(files("sphinx-mathjax-offline") / "static")]
html_extra_path = ["root"]
html_css_files = ["book.css"]

html_theme = "sphinx_book_theme"
html_title = "minipar"
html_show_sourcelink = False
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": True,
    "home_page_in_toc": True,
    "pygments_light_style": "default",
}
# On GitHub, where its address is known: each notebook opens in Colab, from a branch of copies with
# a first cell that installs minipar (see `python book/colab.py`).
if repository := os.environ.get("GITHUB_REPOSITORY"):
    html_theme_options |= {
        "repository_url": f"https://github.com/{repository}",
        "repository_branch": "colab",
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
        "use_repository_button": True,
    }


def setup(app):
    app.connect("source-read", lambda app, name, text: text.__setitem__(0, pages.inside(text[0])))
