"""Step times predicted beside those measured: `python -m minipar.lab.predicted TABLE.csv ...`."""

import sys

from minipar.lab import draw
from minipar.sim import validate

OUT = "notebooks/assets/predicted.png"


def main(tables: list[str]) -> None:
    """Draw a dot per run of the tables, of each source in a colour of its own, into `OUT`."""
    runs = [run for table in tables for run in validate.read(table)]
    dots: dict[str, tuple[list[float], list[float]]] = {}
    for run in runs:
        name = run.source.split("_table")[0].replace("_", " ") + " (fitted)" * (run.split == "tune")
        measured, predicted = dots.setdefault(name, ([], []))
        measured.append(run.seconds)
        predicted.append(run.predicted)
    dots = dict(sorted(dots.items(), key=lambda source: "(fitted)" not in source[0]))  # below all
    grey = {name: draw.MUTED for name in dots if "(fitted)" in name}
    ends = [f(run.seconds for run in runs) for f in (min, max)]
    new = [run for run in runs if run.split != "tune"]
    near = (validate.errors((r.predicted for r in new), [r.seconds for r in new]) <= 0.15).mean()
    figure = draw.curves(
        {"as measured": (ends, ends), **dots},
        points=dots,
        xlabel="seconds of a step, measured",
        ylabel="predicted",
        title=f"{near:.0%} of the {len(new)} step times that nothing is fitted to are within 15 %",
        note="published runs on 8 to 3,072 GPUs",
        logx=True,
        logy=True,
        colours=grey
        | {"as measured": draw.INK, "zero bubble": draw.EXPOSED, "seqpar": draw.AXIS["tp"]},
    )
    print(f"drawn into {draw.save(figure, OUT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
