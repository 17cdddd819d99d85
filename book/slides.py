"""Slides: an HTML deck for each agenda of the host's page, made of cells of the notebooks.

    make slides        # writes build/slides; what reveal.js needs lies beside the decks

An arrow to the right leads to the next row of the agenda, one down through its figures.
"""

import re
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from nbconvert import SlidesExporter

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minipar.lab import agenda  # noqa: E402

# nbconvert's own page, but for scripts that it would fetch from elsewhere.
TEMPLATE = """
{%- extends 'reveal/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}
<script>MathJax = {tex: {inlineMath: [["$", "$"]]}}</script>
<script src="mathjax/tex-svg.js"></script>
<style>.reveal img {max-height: 560px; object-fit: contain}</style>
{%- endblock -%}
{%- block footer_js -%}
<script src="reveal/dist/reveal.js"></script>
<script>Reveal.initialize({hash: true, slideNumber: true, width: 1100, height: 720})</script>
{%- endblock -%}
"""


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(files("sphinx_revealjs") / "_static/revealjs", out / "reveal")
    (out / "mathjax").mkdir()
    shutil.copy(files("sphinx-mathjax-offline") / "static/mathjax/tex-svg.js", out / "mathjax")
    folder = ROOT / "notebooks"
    notebooks = {p.stem: nbformat.read(p, as_version=4) for p in folder.glob("*.ipynb")}
    exporter = SlidesExporter(
        template_file="deck",
        extra_loaders=[DictLoader({"deck": TEMPLATE})],
        reveal_url_prefix="reveal",
        reveal_theme="white",
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
    )
    for title, rows in agenda.read(folder).items():
        deck = agenda.slides(title, rows, notebooks)
        html, _ = exporter.from_notebook_node(deck, {"metadata": {"name": title}})
        name = re.sub(r"\W+", "_", title.lower()).strip("_")
        (out / f"{name}.html").write_text(html, encoding="utf-8")
        print(out / f"{name}.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
