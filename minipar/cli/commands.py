"""All commands by name. tyro reads their flags, and writes their help.

A command is imported when it is asked for: `minipar --help` needs none of them, and no torch.
"""

import argparse
import importlib
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from minipar import __version__

GROUPS: dict[str, dict[str, tuple[str, str]]] = {  # module:function, and what it does
    "Train, and use what was trained": {
        "train": ("cli.training:train", "train a Llama on several ranks"),
        "generate": ("cli.weights:generate", "let a trained model go on with a text"),
        "export": ("cli.weights:export", "write the weights of a run for Hugging Face"),
    },
    "Look, plan and prove": {
        "doctor": ("tools.doctor:run", "what this machine has, and whether ranks work"),
        "overlap": ("cli.looking:overlap", "how much communication do traces hide?"),
        "hang": ("cli.looking:hang", "who keeps this hanging job waiting?"),
        "prove": ("cli.looking:prove", "is your parallel training equal to one device?"),
        "plan": ("cli.looking:plan", "which plan would train this model fastest there?"),
    },
    "Measure ours beside PyTorch's own": {
        "bench compression": ("lab.bench.compression:run", "every way to send less"),
        "bench": ("lab.bench.strategies:run", "a strategy: ddp, fsdp, tensor, ..."),
    },
}
COMMANDS = {name: where for group in GROUPS.values() for name, (where, _) in group.items()}


def function_of(name: str) -> Callable[[Any], Any]:
    """Return the function of a command; it takes a dataclass of flags."""
    module, _, function = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f"minipar.{module}"), function)


def parse(argv: list[str]) -> tuple[str, Any]:
    """Return the name of the command and its typed flags.

    Raises `ValueError` for an unknown command, and `SystemExit` for a flag that tyro refuses.
    """
    if not argv or argv[0] in ("-h", "--help", "-V", "--version"):
        print(f"minipar {__version__}" if {*argv[:1]} & {"-V", "--version"} else usage())
        sys.exit(0)
    # The longest command that the line begins with: "bench compression" stands before "bench".
    name = next((n for n in COMMANDS if argv[: len(n.split())] == n.split()), None)
    if name is None:
        raise ValueError(f"{argv[0]!r} is no command; use one of {', '.join(COMMANDS)}")
    flags, default = argv[len(name.split()) :], tyro.MISSING_NONPROP
    kind = next(iter(get_type_hints(function_of(name)).values()))
    if name == "train":
        first = argparse.ArgumentParser(f"minipar {name}", add_help=False, allow_abbrev=False)
        first.add_argument("--resume", default="")
        first.add_argument("--config", default="")
        given, _ = first.parse_known_args(flags)
        filed = _flags_of(given.config) if given.config else []
        given, _ = first.parse_known_args(filed + flags)  # the file may say --resume
        default = importlib.import_module("minipar.cli.training").defaults(given.resume)
        # Read first and alone: a typed --plan counts more than the file's mesh.
        default = tyro.cli(kind, default=default, prog=f"minipar {name}", args=filed)
    if {"-h", "--help"} & {*flags}:
        flags = ["--help"]  # tyro's usage leaves out what is typed before it
    return name, tyro.cli(kind, default=default, prog=f"minipar {name}", args=flags)


def usage() -> str:
    """Return all commands, in groups."""
    lines = ["usage: minipar COMMAND [flags]"]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  minipar {name:18} {summary}" for name, (_, summary) in group.items()]
    return "\n".join([*lines, "", "`minipar COMMAND --help` lists the flags."])


def _flags_of(file: str) -> list[str]:
    """Return the flags of a TOML file, as they would be typed."""
    try:
        values = tomllib.loads(Path(file).read_text(encoding="utf-8-sig"))  # Windows marks it
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {file}: {error}") from None
    if "config" in values:
        raise ValueError(f"--config {file}: it names another file; put all flags into one")
    typed = []
    for name, value in values.items():
        switch = f"--no-{name}" if value is False else f"--{name}"
        typed.append(switch if isinstance(value, bool) else f"--{name}={value}")
    return typed
