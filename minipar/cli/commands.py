"""All commands by name; their flags are read, their help is written.

A command is imported when it is asked for: `minipar --help` needs none of them, and no torch.
"""

import contextlib
import difflib
import importlib
import inspect
import io
import re
import sys
from collections.abc import Callable
from dataclasses import fields, make_dataclass
from typing import Any, NamedTuple, get_type_hints

import tyro

from minipar import __version__


def parse(argv: list[str]) -> tuple[str, Any]:
    """Return the name of the command and its typed flags, a dataclass of `COMMANDS`.

    Raises `ValueError` with one line for a bad flag or value.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        sys.exit(0)
    if argv[0] in ("-V", "--version"):
        print(f"minipar {__version__}")
        sys.exit(0)
    # The longest command that the line begins with: "bench ddp" before "bench".
    name = next((n for n in COMMANDS if argv[: len(n.split())] == n.split()), None)
    if name is None:
        asked = " ".join(argv[: 2 if argv[0] == "bench" else 1])
        near = difflib.get_close_matches(asked, COMMANDS, 1)
        hint = f"did you mean {near[0]}? There are" if near else "use one of"
        raise ValueError(f"{asked!r} is no command; {hint} {', '.join(COMMANDS)}")
    kind, flags = COMMANDS[name].config, argv[len(name.split()) :]
    if "" in flags:
        raise ValueError(
            "one of the arguments is empty; is a variable of the shell not set? To take a value "
            "away, write --flag="
        )
    default = tyro.MISSING_NONPROP
    if name == "train" and (resumed := _value_of("--resume", flags)) is not None:
        default = importlib.import_module("minipar.cli.training").config_of(resumed)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            command = _typed(name, kind, flags, default)
    except SystemExit as stop:
        if stop.code:
            raise ValueError(_first_words(complaint.getvalue())) from None
        raise
    return name, command


def _typed(name: str, kind: type, flags: list[str], default: Any) -> Any:
    """Let tyro read the flags of a command; those that `kind` has from several parents in groups.

    A group is a parent, in whose name and words they are shown.
    """
    lines = "".join(f"\n  minipar {name} {flags}".rstrip() for flags in COMMANDS[name].examples)
    told = dict(prog=f"minipar {name}", args=flags)
    told["description"] = f"{inspect.getdoc(kind)}\n\nExamples:{lines}"
    if len(kind.__bases__) == 1:
        return tyro.cli(kind, default=default, **told)
    default = kind() if default is tyro.MISSING_NONPROP else default
    parents = {parent.__name__.lower(): parent for parent in reversed(kind.__bases__)}
    groups = make_dataclass(
        kind.__name__, [(n, tyro.conf.OmitArgPrefixes[parent]) for n, parent in parents.items()]
    )
    usual = {
        n: parent(**{f.name: getattr(default, f.name) for f in fields(parent)})
        for n, parent in parents.items()
    }
    found = tyro.cli(groups, default=groups(**usual), **told)
    return kind(**{k: v for n in parents for k, v in vars(getattr(found, n)).items()})


def _usage() -> str:
    """Return what there is, in groups, the most used first."""
    lines = ["usage: minipar COMMAND [flags]"]
    for title, group in _GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  minipar {name:18} {command.summary}" for name, command in group.items()]
    lines += ["", "Examples:"]
    lines += [f"  minipar {name} {COMMANDS[name].examples[0]}".rstrip() for name in _FIRST]
    how = "`minipar COMMAND --help` lists the flags; `minipar --version` says which this is."
    return "\n".join([*lines, "", how])


def _value_of(flag: str, argv: list[str]) -> str | None:
    """The last value that `flag` is given: that is the one which counts."""
    value = None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            value = argv[i + 1]
        if word.startswith(flag + "="):
            value = word.partition("=")[2]
    return value


def _first_words(box: str) -> str:
    """What is wrong, out of the box that tyro draws around it: the lines above its first rule.

    And of what follows, the flags that may have been meant.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯]", "", box)
    # A locale without letters for boxes has a title above a rule of dashes.
    body = re.sub(r"─ [^\n]* ─+|\A[^\n]*\n -{9,}", "", plain, count=1)
    first, *rest = re.split(r"[─-]{9,}", body)
    near = [word for part in rest if "Perhaps" in part for word in re.findall(r"\n +(--\S+)", part)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return (" ".join(first.split()) or "cannot read the command line") + hint


class _Command(NamedTuple):
    where: str  # module:function
    summary: str
    examples: tuple[str, str, str]  # what follows its name; the first one is the first to be tried

    @property
    def run(self) -> Callable[[Any], Any]:
        """The function; what it takes is the flags."""
        module, _, name = self.where.partition(":")
        return getattr(importlib.import_module(f"minipar.{module}"), name)

    @property
    def config(self) -> type:
        """The dataclass of the flags."""
        return next(iter(get_type_hints(self.run).values()))


_GROUPS = {
    "Train, and use what was trained": {
        "train": _Command(
            "cli.training:train", "train a Llama on several ranks",
            ("--mesh dp=2,tp=2 --steps 100",
             "--preset small --data ~/texts --zero 3 --recompute full",
             "--backend link --link '10gbe*4' --ddp naive"),
        ),
        "generate": _Command(
            "cli.weights:generate", "let a trained model go on with a text",
            ("runs/tiny-dp4 --prompt 'def main('",
             "runs/tiny-dp4/checkpoints/step_000050 --temperature 0",
             "my-llama --tokens 50 --seed 7"),
        ),
        "export": _Command(
            "cli.weights:export", "write the weights of a run for Hugging Face's libraries",
            ("runs/tiny-dp4 my-llama", "runs/tiny-dp4/checkpoints/step_000050 early",
             "runs/tiny-dp4-2 ~/models/second"),
        ),
    },
    "Look, plan and prove": {
        "doctor": _Command(
            "tools.doctor:run", "what this machine has, and whether ranks work on it",
            ("", "--out /nfs/runs", "> issue.txt"),
        ),
        "overlap": _Command(
            "cli.looking:overlap", "how much communication do these traces hide?",
            ("traces/", "trace-rank0.json trace-rank1.json.gz --out mine.png", "runs/tiny-dp4"),
        ),
        "hang": _Command(
            "cli.looking:hang", "who keeps this hanging job waiting?",
            ("dumps/", "nccl_trace_rank_0 nccl_trace_rank_1 --out hang.png",
             "runs/tiny-dp4/stalled.json"),
        ),
        "prove": _Command(
            "cli.looking:prove", "is your parallel training equal to one device?",
            ("mine.py --mesh dp=2,tp=2", "mine.py --mesh dp=4 --steps 5",
             "mine.py --mesh tp=2 --json"),
        ),
        "plan": _Command(
            "cli.looking:plan", "which plan would train this model fastest there?",
            ("--model llama-3-70b --gpus 64 --hardware h100-ndr",
             "--model my-llama/config.json --gpus 8 --software minipar",
             "--gpus 16 --explain dp=8,tp=2,zero=1,microbatches=4 --global-batch 64"),
        ),
        "calibrate": _Command(
            "sim.calibrate:run", "measure this machine, for `minipar plan`",
            ("", "--ranks 2 --out laptop.toml"),
        ),
    },
    "Measure ours beside PyTorch's own": {
        "bench compression": _Command(
            "lab.bench.compression:run", "every way to send less: what it saves, and costs",
            ("", "--methods int8 'PowerSGD rank 4'", "--out compression.png"),
        ),
        "bench experts": _Command(
            "lab.bench.expert_overlap:run", "ways to hide the all-to-alls of experts",
            ("", "--ranks 4", "--json rows.json"),
        ),
        "bench idle": _Command(
            "lab.bench.pipeline_idle:run", "idle time of every pipeline schedule, as simulated",
            ("", "--ranks 2", "--out pictures"),
        ),
        "bench": _Command(
            "lab.bench.strategies:run", "a strategy beside PyTorch's own: ddp, fsdp, tensor, ...",
            ("ddp", "fsdp --links gloo 1gbe --rounds 10", "pipeline --json rows.json"),
        ),
    },
}  # fmt: skip
COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}
_FIRST = "train", "generate", "plan"
"""Commands of which the usage shows an example."""
