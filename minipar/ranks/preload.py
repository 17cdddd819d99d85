"""Imported by the fork server alone: what every rank finds imported, which signals are ignored."""

import os
import signal

os.setsid()  # Ctrl-C, and a notebook that shuts down, are for the parent, which decides
os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# A scheduler sends SIGTERM or SIGUSR1 to every process of a job. The ranks decide what to do then.
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)

import torch._dynamo  # noqa: E402, F401 (the first optimizer of a rank would import it: a second)

import minipar.ranks.worker  # noqa: E402, F401
