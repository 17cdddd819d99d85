"""`minipar overlap`, `hang`, `prove` and `plan`: look at trainings, of any code, or planned."""

import json
import math
import re
import sys
import traceback
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import tyro
from tqdm import tqdm

from minipar.comm.mesh import RESERVED
from minipar.lab import choosing, draw
from minipar.lab.draw import hang as draw_hang
from minipar.observe import hang as observe_hang
from minipar.observe.spans import clipped, is_ours
from minipar.observe.timeline import Timeline
from minipar.ranks.backends import check_ranks
from minipar.ranks.launch import Ranks
from minipar.sim import planner
from minipar.tools import dumps
from minipar.tools.overlap import breakdown
from minipar.tools.prove.compare import RTOL
from minipar.tools.prove.prove import prove as judge
from minipar.tools.traces import from_profiler
from minipar.train.config import check_numbers


@dataclass(frozen=True)
class Overlap:
    """Show how much communication a training job hides: its own, or any PyTorch traces."""

    traces: tyro.conf.Positional[list[str]]
    """Chrome traces of torch.profiler (.json or .json.gz), one file per rank, or a folder of them;
    or a run of `minipar train`, or its timeline.json."""
    out: str = "overlap.png"
    """Where to draw the picture."""
    json: bool = False
    """Print JSON for programs instead."""


@dataclass(frozen=True)
class Hang:
    """Say why a job hangs, from what its ranks wrote down: who waits for whom, who did not come.

    Exit code 1 where a hang is found, 0 where none is.
    """

    dumps: tyro.conf.Positional[list[str]]
    """Dumps of PyTorch's flight recorder (pickle or JSON), one file per rank, or their folder."""
    out: str = ""
    """Where to draw the picture, if at all."""


@dataclass(frozen=True)
class Prove:
    """Is *your* parallel training equal to one device? If not, where does it differ first?

    Ends with exit code 0 if it is, 1 if not, 2 if the file cannot be run or compared.
    """

    file: tyro.conf.Positional[str]
    """A Python file with build(), batch(seed), loss(model, batch) and parallelize(model, mesh),
    which returns the model, or the model and a function to call after backward. What else it may
    have: see minipar/tools/prove/job.py."""
    mesh: str = "dp=2"
    """Axes and sizes, such as dp=2,tp=2. Ranks of axes named dp, fsdp or ep have rows of their own
    of a batch, those of tp, cp or pp the same; for other names the file must say it."""
    rtol: float = RTOL
    """Largest difference that counts as equal, relative to the largest number of a tensor."""
    timeout: float = 30.0
    """Seconds for which a collective waits for missing ranks before it fails; a run may take 20
    times as long."""


MOST_DRAWN = 256  # ranks in one picture: more would take gigabytes


def overlap(command: Overlap) -> None:
    """Print how much communication the traces hide, per rank and axis, and draw it."""
    recorded = read_timeline(command.traces)
    parts = breakdown(recorded)
    if command.json:
        print(json.dumps(asdict(parts) | {"ranks": [asdict(o) for o in recorded.overlap()]}))
        return
    print(f"{recorded}\n\n{parts}".rstrip())
    here, label, spans = recorded.ranks, recorded.label, recorded.spans
    if len(here) > MOST_DRAWN:
        print(f"drawn are the first {MOST_DRAWN} of {len(here)} ranks", file=sys.stderr)
        here = here[:MOST_DRAWN]
        spans = [span for span in spans if span.rank in here]
    rounds = recorded.steps.get(here[0], []) if here else []
    middle = rounds[len(rounds) // 2] if len(rounds) > 1 else None
    if middle:  # of many steps in one picture nothing could be seen
        name, begin, end = middle
        label = f"{label} {name}".strip()
        spans = clipped(spans, dict.fromkeys(here, begin), dict.fromkeys(here, end))
    where = draw.save(draw.timeline(Timeline(spans, label)), command.out)
    print(f"drawn into {where}" + (f": {middle[0]}" if middle else ""))


def read_timeline(traces: list[str]) -> Timeline:
    """Read a timeline of ours, also by the folder of its run, or the traces of torch.profiler."""
    if len(traces) == 1 and (run := Path(traces[0]) / "metrics.jsonl").exists():
        traces = [str(run.with_name("timeline.json"))]
        if not Path(traces[0]).exists():
            raise ValueError(f"{run.parent} has no timeline.json yet: a run writes it at its end")
    if len(traces) == 1 and is_ours(traces[0]):
        recorded = Timeline.load(traces[0])
        if not recorded.spans:
            raise ValueError(f"{traces[0]} is a timeline without spans")
        return recorded
    return from_profiler(traces)


def hang(command: Hang) -> None:
    """Print what the dumps tell, and end the process with 1 where a call has not ended."""
    if not command.dumps:
        raise ValueError("name the dumps: minipar hang FOLDER, or minipar hang nccl_trace_rank_*")
    report = observe_hang.explain(dumps.read(command.dumps))
    print(report)
    if command.out:
        print(f"\ndrawn into {draw.save(draw_hang.hang(report), command.out)}")
    if report.findings:
        sys.exit(1)


def parse_mesh(text: str) -> dict[str, int]:
    """Return {"dp": 2, "tp": 2} for "dp=2,tp=2". Raises `ValueError` for other text."""
    sizes = dict(re.findall(r"([A-Za-z_]\w*)=([1-9]\d{0,8})", text))
    read = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    if not read or read != text.replace(" ", "") or not sizes.keys().isdisjoint(RESERVED):
        raise ValueError(
            f"--mesh {text!r} is not axis=size, with new names (none of {', '.join(RESERVED)}) and "
            f"sizes from 1 up; try dp=2,tp=2"
        )
    return {axis: int(size) for axis, size in sizes.items()}


def prove(command: Prove) -> None:
    """Print whether a training equals one device; exit with 1 where it parts."""
    sizes = parse_mesh(command.mesh)
    check_numbers(command, {"timeout": 1})
    if not 0 < command.rtol < 1:
        raise ValueError(f"--rtol {command.rtol} must be between 0 and 1, such as 1e-10")
    timeout, size = command.timeout, math.prod(sizes.values())
    check_ranks(size)
    with Ranks(1, timeout=timeout) as one, Ranks(size, timeout=timeout) as many:
        one.time_limit = many.time_limit = 20 * timeout
        pool = {1: one, many.size: many}.__getitem__
        try:
            verdict = judge(command.file, sizes, pool, command.rtol)
        except ValueError:
            raise  # which ends with exit code 2, in one line
        except Exception:  # exit code 1 would mean that it is not equal
            traceback.print_exc()
            sys.exit(2)
    print(verdict)
    if verdict.parting is not None:
        sys.exit(1)


def plan(command: planner.PlanConfig) -> None:
    """Print the plans that would train a model fastest, and why; draw where their time goes."""
    text, plans = planner.answer(command, partial(tqdm, disable=None, leave=False, unit="plan"))
    print(text, flush=True)
    if command.json:
        return
    if command.explain:
        _simulated(command, plans[0])
    elif command.out:
        inks = {"bubble": "idle", "host": "copy", "fixed": "optimizer"}
        figure = draw.bars(
            choosing.where_time_goes(plans),
            unit="s",
            title=f"{command.model} on {command.gpus} x {command.hardware}: a step's time",
            note="predicted, in closed form",
            colours={part: draw.colour(ink) for part, ink in inks.items()},
        )
        print(f"\ndrawn into {draw.save(figure, command.out)}")


def _simulated(command: planner.PlanConfig, plan: planner.Ranked) -> None:
    """Print and draw the first microbatches of the plan, run by minipar's own code."""
    short = planner.shorter(plan.job)
    try:
        simulated = planner.simulate(short)
    except ValueError as error:
        print(f"\nminipar's own code: not traced: {error}")
        return
    some = f"{short.plan.microbatches} of {plan.job.plan.microbatches} microbatches"
    exposed = [f"{axis} {s:.2f} s" for axis, s in simulated.exposed.items() if s > 5e-3]
    print(
        f"\nminipar's own code, traced and replayed: {simulated.seconds:.2f} s for {some}, "
        f"{simulated.peak_bytes / 1e9:.0f} GB of tensors at the peak; exposed: "
        f"{', '.join(exposed) or 'nothing'}"
    )
    if command.out:
        title = f"{command.model} on {command.gpus} x {command.hardware}"
        figure = draw.timeline(simulated.timeline, title=title, unit=f"for {some}")
        print(f"\ndrawn into {draw.save(figure, command.out)}")
