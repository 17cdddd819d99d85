"""How fast is one device? Training of a real Llama, over the settings that make it fast.

For `gpu_check`, which runs `ours` and `theirs` in a fresh process each. FLOP/s by the model's own
count are set beside what one large matrix product reaches on the same device in the same minute;
seconds and memory, beside what the simulator says of the same step.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from minipar.comm.mesh import Mesh
from minipar.model.hf import config_json
from minipar.model.llama import PRESETS, Llama, LlamaConfig, token_loss
from minipar.model.recompute import checkpoint_activations
from minipar.parallel.base import masters
from minipar.parallel.plan import Plan
from minipar.ranks import backends
from minipar.sim import hardware
from minipar.sim.trace import Traces, trace
from minipar.train.compiled import compile_blocks
from minipar.train.peak import matmul_rate, synchronise
from minipar.train.report import peak_memory
from minipar.train.step import train_step

PRECISIONS = {"fp32": "float32", "bf16": "bf16"}


@dataclass(frozen=True)
class Setting:
    """One way to train on one device; the words are those of `minipar train`."""

    preset: str
    batch_size: int  # sequences per step
    seq_len: int = 2048
    compile: bool = False  # each block, by inductor
    recompute: Literal["none", "selective", "full"] = "none"
    steps: int = 10  # that are timed


def settings(preset: str) -> list[Setting]:
    """Return the settings to try: the plain one first, then what should be faster, or smaller."""
    return [
        Setting(preset, 4),
        Setting(preset, 4, compile=True),
        Setting(preset, 8, compile=True),
        Setting(preset, 8),
        Setting(preset, 2, recompute="full"),
    ]


def fresh(shape: LlamaConfig, device: torch.device) -> Llama:
    """Return a model whose weights are drawn where it is: faster, and others than in a run."""
    with torch.device("meta"):
        model = Llama(shape)
    model.to_empty(device=device).tie_weights()
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    return model


def learner(model: nn.Module, dtype: torch.dtype) -> torch.optim.Optimizer:
    """Return what steps `model`, which computes in `dtype`; in bf16 its masters learn."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if dtype != torch.float32:
        masters.keep(model, optimizer, dtype)
    return optimizer


def timed(setting: Setting, shape: LlamaConfig, step: Callable) -> float:
    """Return the median seconds of ``step(batch)`` on random tokens."""
    device, size = backends.compute_device(), (setting.batch_size, setting.seq_len + 1)
    tokens = torch.randint(shape.vocab_size, size, device=device)
    batch = [(tokens[:, :-1], tokens[:, 1:].contiguous())]
    seconds = []
    for _ in range(3 + setting.steps):
        synchronise(device)
        start = time.perf_counter()
        step(batch)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def ours(setting: Setting) -> dict[str, Any]:
    """Train on one device; return tokens/s, FLOP/s by the model's own count, and memory."""
    mesh, device = Mesh(), backends.compute_device()
    shape, dtype = PRESETS[setting.preset], computing_dtype(device)
    model = fresh(shape, device)
    optimizer = learner(model, dtype)
    checkpoint_activations(model, setting.recompute)
    if setting.compile:
        compile_blocks(model)

    def step(batch: Any) -> None:
        train_step(model, [], optimizer, batch, mesh.dp, max_norm=1.0)

    seconds = timed(setting, shape, step)
    peak_bytes = peak_memory(device) if device.type == "cuda" else None
    num_tokens = setting.batch_size * setting.seq_len
    rate = shape.flops_per_token(setting.seq_len) * num_tokens / seconds
    peak = matmul_rate(device, dtype, size=8192 if device.type == "cuda" else 512)
    return {
        "check": "utilisation",
        "device": name_of(device),
        **asdict(setting),
        "dtype": str(dtype).removeprefix("torch."),
        "step_ms": 1e3 * seconds,
        "tokens_per_second": num_tokens / seconds,
        "tflops": rate / 1e12,
        "matmul_tflops": peak / 1e12,
        "share_of_matmul": rate / peak,
        "peak_bytes": peak_bytes,  # of a GPU; a process on the CPU holds much else
    }


def trace_of(setting: Setting) -> Traces:
    """Trace the step that `ours` measures, but for what is compiled of it."""
    device = backends.compute_device()
    dtype = hardware.type_name(computing_dtype(device))
    return trace(
        PRESETS[setting.preset],
        Plan(precision=PRECISIONS[dtype], checkpointing=setting.recompute),
        sequences=setting.batch_size,
        seq_len=setting.seq_len,
        on_cpu=device.type == "cpu",
    )


def sheet_of(device: torch.device) -> hardware.Machine | None:
    """Return the machine that `minipar plan` knows by this device's name."""
    name = name_of(device).lower().replace(" ", "")
    known = [node for node in hardware.names() if node in name]
    return hardware.load(max(known, key=len)) if known else None


def theirs(setting: Setting) -> dict[str, Any]:
    """The same loop with the Llama of `transformers`, where it is installed: tokens per second."""
    row = {"check": "transformers", **asdict(setting)}
    shape, device = PRESETS[setting.preset], backends.compute_device()
    try:
        from transformers import LlamaConfig as Config
        from transformers import LlamaForCausalLM
    except ImportError as error:
        return row | {"tokens_per_second": None, "message": str(error)}
    config = Config.from_dict(config_json(shape, torch.float32) | {"use_cache": False})
    with device:
        model = LlamaForCausalLM(config)
    optimizer = learner(model, computing_dtype(device))

    def step(batch: Any) -> None:
        [(inputs, targets)] = batch
        optimizer.zero_grad(set_to_none=True)
        loss = token_loss(model(inputs).logits, targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    seconds = timed(setting, shape, step)
    return row | {"tokens_per_second": setting.batch_size * setting.seq_len / seconds}


def computing_dtype(device: torch.device) -> torch.dtype:
    """Return what a model computes in: bf16 on a GPU, as of `minipar train --precision bf16`."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def name_of(device: torch.device) -> str:
    """Return what the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
