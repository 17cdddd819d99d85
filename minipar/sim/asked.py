"""The question to `minipar plan`: which model, on which machine, and within which limits."""

import difflib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from minipar.comm.mesh import MOST_RANKS, whole_number
from minipar.model import hf
from minipar.model.llama import PRESETS, LlamaConfig
from minipar.parallel.plan import Plan
from minipar.sim import hardware
from minipar.sim.job import Job

SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads")
LARGER = {"llama-3-70b": (8192, 28_672, 80, 64), "llama-3-405b": (16_384, 53_248, 126, 128)}
"""The sizes in which these models differ from llama-3-8b."""


@dataclass(frozen=True)
class PlanConfig:
    """Rank the plans to train a model on a machine, which you need not have."""

    model: str = "llama-3-8b"
    """A name, a config.json, or a Hugging Face folder."""
    gpus: int = 8
    """Devices in all."""
    hardware: str = "h100-ndr"
    """A machine's name, or a .toml file with numbers of your own: see book/planner.md."""
    seq: int = 0
    """Tokens of a sequence; 0: as many as the model can see, 8192 at most."""
    global_batch: int = 512
    """Sequences of a step."""
    software: str = "any"
    """The software that trains: any, compiled, minipar, megatron, megatron-core, nanotron or
    llm-foundry. Only plans that it can carry out are searched."""
    top: int = 5
    """Plans to show."""
    fix: str = ""
    """Search only plans with these words, such as tp=8,zero=1 or microbatch=2. Only this flag
    varies tp_overlap, context, dispatch, most schedules, and more."""
    replay: bool = True
    """Trace and replay minipar's own code under the best plans. The times order the plans, unless
    --software names other code. Only --software minipar replays selective recomputation."""
    explain: str = ""
    """Explain one plan, such as dp=8,tp=8,zero=1,microbatches=4, instead of a search."""
    json: bool = False
    """Print JSON."""
    out: str = "plan.png"
    """File for a picture of the best plans' steps by part; empty: no picture."""


def model_config(name: str) -> LlamaConfig:
    """Return the shape of a model by its name, config.json or folder; raise `ValueError`."""
    if name in PRESETS:
        return PRESETS[name]
    if name in LARGER:
        sizes = dict(zip(SIZES, LARGER[name], strict=True))
        return replace(PRESETS["llama-3-8b"], head_dim=128, **sizes)
    path = Path(name)
    if path.is_file() and path.name != "config.json":
        raise ValueError(f"--model {name}: name a config.json, or the folder that it is in")
    if path.exists():
        return hf.load_config(path.parent if path.is_file() else path)
    near = difflib.get_close_matches(name.lower(), [*PRESETS, *LARGER], 3, 0.0)
    raise ValueError(f"no model {name!r}, no such file; the nearest names are {', '.join(near)}")


def fixed(text: str, flag: str = "--fix") -> dict[str, Any]:
    """Return the words of a plan that a flag has, and microbatch. Raises `ValueError`."""
    found: dict[str, Any] = {}
    for word in filter(None, text.replace(" ", "").split(",")):
        name, _, value = word.partition("=")
        name = name.replace("-", "_")
        is_size = name == "microbatch"
        found[name] = whole_number(value) if is_size else getattr(Plan.parse(word), name)
        allowed = get_args(Plan.__annotations__.get(name))
        if (allowed and found[name] not in allowed) or (is_size and not found[name]):
            good = ", ".join(map(str, allowed)) or "1 or more"
            raise ValueError(f"{flag} {name}={value}: use {good}")
    return found


def base_of(config: PlanConfig) -> Job:
    """Return what all plans have in common. Raises `ValueError` for what cannot be asked."""
    for name in ("gpus", "global_batch", "top"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: use 1 or more")
    if not Path(config.out).parent.is_dir():
        raise ValueError(f"--out {config.out}: name a file in a folder that exists")
    if config.gpus > MOST_RANKS:
        raise ValueError(f"--gpus {config.gpus:,}: use at most {MOST_RANKS:,}, the largest plan's")
    model = model_config(config.model)
    seq = config.seq or min(8192, model.max_seq_len)
    if not 1 <= seq <= model.max_seq_len:
        raise ValueError(f"--seq {seq}: {config.model} sees 1 to {model.max_seq_len:,} tokens")
    software = hardware.software(config.software)
    machine = hardware.load(config.hardware)
    dtype = "bf16" if "bf16" in machine.device.peak else "fp16"
    return Job(model, Plan(precision=dtype), machine, software, seq, dtype=dtype)


def explained(base: Job, config: PlanConfig) -> Job:
    """Return the plan of `--explain`. Raises `ValueError` if it contradicts the question."""
    if config.fix:
        raise ValueError(f"--fix {config.fix} bounds a search, and --explain has one plan")
    words, own = fixed(config.explain, "--explain"), base.plan.precision
    microbatch = words.pop("microbatch", 0)
    if words.setdefault("precision", own) != own:
        raise ValueError(f"--explain: {base.machine.name} is priced in precision={own} alone")
    plan = Plan(**words)
    plan.check(base.config)
    job = replace(base, plan=plan)
    count = job.dp * plan.microbatches
    batch = count * microbatch or config.global_batch
    if plan.num_ranks != config.gpus or batch % count or batch != config.global_batch:
        raise ValueError(
            f"--explain {config.explain}: it has {plan.num_ranks} ranks and {count} microbatches; "
            f"use --gpus {plan.num_ranks} and --global-batch {math.ceil(batch / count) * count}"
        )
    return replace(job, microbatch=batch // count)
