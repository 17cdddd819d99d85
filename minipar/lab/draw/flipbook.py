"""Pictures that move without a kernel: all frames are drawn beforehand, a slider turns them.

    flip(figure, micro=[1, 2, 4, 8], stages=(2, 4))      # figure(micro, stages) for all eight

The twin of `widgets.explore` for what does not depend on the learner's own code: it moves in
JupyterLab, in a page exported from it and on the web. Where scripts are stripped (on GitHub, in a
notebook that is not trusted) the first frame stands instead. Frames are images that a browser
draws from SVG: all that is written in them is text and never markup.
"""

import inspect
import io
import json
import re
from collections.abc import Callable, Iterable
from html import escape
from itertools import product

from IPython.display import display
from matplotlib import rc_context
from matplotlib.figure import Figure

from minipar.lab.draw import pen

# `lines` has each line of all frames once; a frame is a list of their numbers.
PAGE = """<div class="flipbook" style="max-width:%(width)dpx"></div>
<script>
(() => {
  const book = %(book)s;
  const root = document.currentScript.previousElementSibling;
  const still = root.closest(".jp-OutputArea-child, .output_area, .output");
  if (still && still.previousElementSibling) still.previousElementSibling.style.display = "none";
  const controls = root.appendChild(document.createElement("div"));
  const paper = root.appendChild(document.createElement("div"));
  paper.style.cssText = "background:#fff;aspect-ratio:" + book.paper.join("/");
  const image = paper.appendChild(document.createElement("img"));
  const turn = () => {
    const at = sliders.map(slider => +slider.value);
    const frame = at.reduce((number, i, k) => number * book.choices[k][1].length + i, 0);
    const svg = book.frames[frame].map(line => book.lines[line]).join("\\n");
    image.src = "data:image/svg+xml," + encodeURIComponent(svg);
    image.alt = book.words[frame];
    image.style.width = 100 * book.widths[frame] / book.paper[0] + "%%";
  };
  const sliders = book.choices.map(([name, values]) => {
    const row = controls.appendChild(document.createElement("label"));
    row.style.cssText = "display:inline-flex;gap:.5em;align-items:center;margin:.2em 1.5em .2em 0";
    const slider = document.createElement("input");
    const shown = document.createElement("output");
    shown.style.minWidth = "5em";
    row.append(name + " ", slider, shown);
    Object.assign(slider, {type: "range", min: 0, max: values.length - 1, step: 1});
    slider.value = book.start[name];
    const tell = () => {
      shown.textContent = values[slider.value];
      slider.setAttribute("aria-valuetext", values[slider.value]);
    };
    slider.addEventListener("input", () => { tell(); turn(); });
    tell();
    return slider;
  });
  turn();
})();
</script>"""


class Flipbook:
    """The pictures of `draw_fn` for all combinations of values; sliders turn from one to another.

    Controls start at the defaults of `draw_fn`. `frames` are in the order of
    `itertools.product(*choices.values())`. `html` is a part of a page that needs nothing else.
    """

    def __init__(self, draw_fn: Callable[..., Figure], **choices: Iterable) -> None:
        self.choices = choices = {name: list(values) for name, values in choices.items()}
        every = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
        self.frames = frames = [draw_fn(**values) for values in every]
        defaults = {n: p.default for n, p in inspect.signature(draw_fn).parameters.items()}
        start = {  # the number of a value, by name
            n: v.index(defaults[n]) if defaults[n] in v else 0 for n, v in choices.items()
        }
        self.first = {name: values[start[name]] for name, values in choices.items()}
        self.still = frames[every.index(self.first)]
        lines: dict[str, int] = {}
        numbered = [
            [lines.setdefault(line, len(lines)) for line in small_svg(figure).split("\n")]
            for figure in frames
        ]
        sizes = [[round(96 * inches) for inches in f.get_size_inches()] for f in frames]
        widths, heights = zip(*sizes, strict=True)
        book = {
            "paper": [max(widths), max(heights)],  # pixels
            "widths": widths,
            "choices": [[name, [f"{v}" for v in values]] for name, values in choices.items()],
            "start": start,
            "words": [pen.in_words(figure) for figure in frames],
            "lines": list(lines),
            "frames": numbered,
        }
        # In a script, only "<" could end it.
        text = json.dumps(book, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
        self.html = PAGE % {"width": max(widths), "book": text}

    def __repr__(self) -> str:
        return f"Flipbook of {len(self.frames)} frames: {', '.join(self.choices)}"

    def _ipython_display_(self) -> None:
        # Two outputs: the second hides the first where its script runs.
        at = ", ".join(f"{name} = {value}" for name, value in self.first.items())
        alt = f"One of {len(self.frames)} pictures, {at}: {pen.in_words(self.still)}"
        still = {"image/png": pen.png(self.still), "text/plain": repr(self)}
        display(still, raw=True, metadata={"image/png": {"alt": alt}})
        display({"text/html": self.html, "text/plain": escape(repr(self))}, raw=True)


flip = Flipbook


def small_svg(figure: Figure) -> str:
    """Return the figure as SVG: letters as letters, coordinates to a hundredth.

    Without a date, and with the same names of its parts every time.
    """
    letters = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Verdana"]}
    buffer = io.StringIO()
    with rc_context(letters | {"svg.hashsalt": "minipar"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"| id="[^ph][^"]*"| id="p\w+_\d+"', "", text)
    return re.sub(r"\n\s*", "\n", re.sub(r" *\n(?=[A-Zz\"])", " ", text)).strip()
