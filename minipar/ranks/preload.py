"""Imported by the fork server alone: it imports modules for all ranks, and ignores some signals."""

import os
import signal

os.setsid()  # only the parent gets Ctrl-C, and the signal of a notebook that shuts down

# A scheduler sends SIGTERM or SIGUSR1 to every process of a job. The ranks decide what to do then.
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)

import torch._dynamo  # noqa: E402, F401 (else each rank's first optimizer imports it, in 1 s)

import minipar.ranks.worker  # noqa: E402, F401
