"""Every picture, in one table: it is drawn, has a text that stands for it, and says what it must.

Where things stand in a picture: test_draw.py, and test_draw_lessons.py for pictures of one lesson.
"""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from minipar.comm.plans import ALL_REDUCE
from minipar.lab import draw
from minipar.lab.draw import context, expert, llama, meshes, numbers, pen, pipeline
from minipar.lab.draw import memory as memory_of
from minipar.lab.draw.holdings import Phase, holdings
from minipar.lab.draw.mechanism import Box, mechanism
from minipar.lab.draw.tensor import Matrix, formula
from minipar.lab.memory import MemoryHistory
from minipar.model.llama import PRESETS
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.pipeline.simulate import Costs
from tests.lab.figures import step, texts

TINY, MB = PRESETS["tiny"], 10**6
HISTORY = MemoryHistory(
    {
        "activations": [0, 30 * MB, 5 * MB, 0],
        "parameters": [8 * MB] * 4,
        "gradients": [0, 0, 8 * MB, 8 * MB],
        "gathered": [0, 2 * MB, 0, 0],
    },
    {"optimizer": [0, 0, 16 * MB, 16 * MB]},
    ["forward", "forward", "backward", "backward"],
)
BOXES = {
    "g": Box("a gradient", 0, 0, "gradients"),
    "sum": Box("all-reduce", 1, 0, "dp"),
    "step": Box("a step", 1, 1),
}


def beside(*more: Span) -> Timeline:
    return Timeline([*step(True).spans, *more])


def ring(size):
    """An all-gather round a ring: after round k, rank r has the blocks r-k to r."""
    held = [[[] for _ in range(size)] for _ in range(size)]
    history = {}
    for number in range(size):
        for rank in range(size):
            block = (rank - number) % size
            held[rank][block] = {block}
        history[f"round {number}"] = [list(row) for row in held]
    return history


def plans(name, size):
    return {name: [ALL_REDUCE[name](24, rank, size) for rank in range(size)]}


def fp16(tensor):
    return numbers.magnitudes({"x": tensor.double()}, torch.float16, name="fp16")


X, A = Matrix("x", "T", "D"), Matrix("A", "D", "F", cut="columns")
Y = Matrix("y", "T", "D", pending=True)
LINE, AB = ([1, 2], [3, 4]), {"rows": "ab", "columns": "cd"}
STACKED = {"ddp": {"weights": 2, "optimizer": 12}, "zero": {"weights": 0.5}}
SHARES = {"a": {"x": 30, "y": 70}, "b": {"x": 99.9, "y": 0.1}}
SHORT = [Span("compute", "step", rank, 0.5, 0.5 + 1e-5) for rank in range(4)]
HOST = Span("comm", "to_host", 0, 0.0, 0.03, "host", 8)
EXPERTS = [[[0, 3], [3, 2]], [[1, 3], [2, 3]]]  # two ranks, two tokens each; 4 experts
PHASE = Phase("step", "whole", "own", "own", "reduce-scatter dp")
HALF = torch.tensor([0.0, 2.0**-25, 1.01 * 2.0**-25, 1.0, 65504.0, 65519.0, 65520.5, torch.inf])

# name -> (how it is drawn, what it says; what it does not say)
PICTURES = {
    "timelines": (
        lambda: draw.before_after({"After backward": step(False), "Overlapped": step(True)}),
        "After backward | 190 ms a step, nothing hidden; 145 ms a step, 75 % of communication "
        "hidden; dp all-reduce, hidden; dp all-reduce, exposed; waits; -copy; -pale: hidden; "
        "Measured, 4 ranks. |; -Measured, 4 ranks. Measured",
    ),
    # Mutant: axes that have no colour of their own, in the order of a set.
    "host": (
        lambda: draw.timeline(Timeline([HOST, replace(HOST, axis="other", name="all_gather")])),
        "copies from and to the host | other all-gather",
    ),
    # Bars of a tenth of a pixel are no part of the legend.
    "short": (lambda: draw.timeline(beside(*SHORT)), "-| step; -other work; -compute"),
    # ------------------------------------------------------------------ meshes, messages
    "mesh": (lambda: draw.mesh(dict(dp=2, tp=3)), "6 ranks: dp 2 × tp 3; tp groups: 0 1 2  |  3"),
    "panels": (lambda: draw.mesh(dict(pp=2, dp=4, tp=8)), "pp groups: 0 32  |  1 33"),
    "6 ranks": (lambda: draw.collective("all_reduce", 6), "every rank gets the sum; Σ5"),
    "rounds": (lambda: draw.rounds(ring(3), title="A ring"), "A ring; round 2; rank 2; -rank 3"),
    "plans": (lambda: meshes.schedules(plans("ring", 4), numel=24), "6 rounds; rank 3; passed on"),
    # ------------------------------------------------------------------ curves, bars
    "curves": (lambda: draw.curves({"a long name, it is": LINE}, title="t"), "a long name, it is"),
    "bars": (lambda: draw.bars({"ours": 717}, unit="ms", title="A"), "717 ms; | A"),
    "stacked": (lambda: draw.bars(STACKED, unit="GB"), "14 GB; 0.5 GB; | weights; | 2 |; -→"),
    "narrow parts": (lambda: draw.bars(SHARES, unit="%"), "30 |; 70 |; 99.9; 100 %; -| 0.1"),
    # ------------------------------------------------------------------ pictures of one lesson
    "mask": (lambda: context.mask(6, "plain", title="a"), "number: step of the ring"),
    "journey": (lambda: expert.journey(EXPERTS, 4), "2 rows; 6 rows; 1 3; expert 3, on rank 1"),
    "heat": (lambda: expert.heat({"": [[1, 2], [3]]}, **AB), "| 2 |; | 3 |; | b |; | d"),
    "holdings": (lambda: holdings({"s": [PHASE]}), "reduce-scatter | dp"),
    "model": (
        lambda: llama.model(TINY),
        "4 · 49,152; 4 · 132,096; 32,768; same as embed; a layer, 4 times; 758,912",
    ),
    "rotations": (lambda: llama.rotations(TINY), "Pair 0 turns by 57° per token; t = 7"),
    "attention": (lambda: llama.attention(TINY), "q0; q3; k0  v0; k1  v1; -q4"),
    "mechanism": (lambda: mechanism(BOXES, [("g", "sum", "then")], title="A"), "a gradient; then"),
    "memory": (
        lambda: memory_of.ladder({"": HISTORY}, note="measured"),
        "at most 40 MB, 30 MB of it activations; the host holds 16 MB; Measured.; gathered weights",
    ),
    "closed form": (
        lambda: memory_of.ladder({"ddp": HISTORY}, closed_forms={"ddp": {"optimizer": 24.0 * MB}}),
        "ddp; form of\nstate:\n24 MB",
    ),
    "bits": (lambda: numbers.bits(0.1), "= 0.09997558594; = 0.09375; float32"),
    # Half of the smallest rounds to zero, half a step above the largest to infinity: one of six.
    "magnitudes": (lambda: fp16(HALF), "16.7% to zero; 16.7% overflow; all digits of fp16; -none"),
    "schedules": (
        lambda: pipeline.compare({"First": make("gpipe", 4, 8), "Then": make("1f1b", 4, 8)}),
        "First | idle 27 % of the time, 8 microbatches held; Then | idle 27 % of the time, 4 "
        "microbatches held; | backward; | waits; number: microbatch; Simulated.; -weight; -stage",
    ),
    # Each of two stages is a whole share of the model.
    "dualpipe": (lambda: pipeline.schedule(make("dualpipe", 4, 8)), ", 5 microbatches held"),
    "messages": (lambda: pipeline.schedule(make("gpipe", 3, 2), Costs(message=0.5)), "pp message"),
    "formula": (
        lambda: formula([X, "·", A, "=", Y], size=4, title="a sum"),
        "x[T, D]; A[D, F/tp]; y[T, D] {partial tp}; Σ; the same on every rank",
    ),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture(name):
    """Small enough, with a text for those who do not see it, and whole: its edge is paper.

    Equal figures are equal files: catches dates, and state that one figure leaves to the next.
    """
    make_it, says = PICTURES[name]
    figure = make_it()
    said = f"| {texts(figure)} |"
    for word in says.split("; "):
        assert (word[1:] not in said) if word.startswith("-") else (word in said), said
    alt = pen.in_words(figure)
    assert all(t.get_text() in alt for t in figure.texts if t.get_weight() == "bold")
    drawn = draw.png(figure)
    assert len(drawn) < 100_000 and drawn == draw.png(make_it())
    pixels = np.asarray(Image.open(io.BytesIO(drawn)).convert("RGB"))
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 255).all()


def test_what_cannot_be_drawn_is_named():
    with pytest.raises(ValueError, match="at most 3 axes and 256 ranks"):
        draw.mesh({"dp": 512})
    with pytest.raises(ValueError, match="Over has no spans"):
        draw.before_after({"Naive": step(False), "Over": Timeline()})
