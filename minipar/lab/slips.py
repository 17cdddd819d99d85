"""A guess, in a sentence, at the slip behind a failing answer: "Did you divide?"

Each wrong answer of an exercise has a sentence, ``@fails("result", "Exactly n times ...")``. How it
fails on the inputs of one seed, the criterion, the message and what was sent, gives a fingerprint.
An answer that fails with the same fingerprint on the same inputs is told the sentence. The file
``slips.json`` beside the exercises holds for each the "seed" and "told", sentences by fingerprint,
and no code: it goes into copies without answers.
``python -m minipar.lab.publish notebooks/ --slips`` writes it again.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Mismatch|Stuck|Race)\b.*$", re.MULTILINE)
PLACE = re.compile(r" at (?:\S+:\d+|Cell In\[\d+\], line \d+)")
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


def fingerprint(
    criterion: str, message: str, sent: Sequence[Sequence[Any]] = (), results: Any = None
) -> str:
    """Return how an answer fails, in twelve letters; `sent` and `results` by rank.

    Numbers count to three digits, so that it is the same on any processor. What was returned counts
    where nothing was sent, and where the answer itself raised, only what was raised, not where.
    """
    if criterion == "run":
        raised = {PLACE.sub("", line) for line in RAISED.findall(message)}
        said = [re.sub(r"\d+", "#", line) for line in sorted(raised)]
    else:
        said = [NUMBER.sub(_rounded, message)]
        said += [str(sorted(Counter(map(str, rank)).items())) for rank in sent]
        said += [] if any(sent) else [_digest(results)]
    return hashlib.sha256("\n".join([criterion, *said]).encode()).hexdigest()[:12]


def _digest(value: Any) -> str:
    """Return a result in short, without numbers that are no tensors: they may be seconds."""
    if isinstance(value, torch.Tensor):
        value = value.double()
        size, total = value.abs().sum().item(), value.sum().item()
        # A sum may be what rounding leaves of nothing: it counts as a part of what was added up.
        return f"{list(value.shape)} {size:.3g} {round(total / size, 2) + 0.0 if size else 0.0}"
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_digest, value))}]"
    return repr(value) if isinstance(value, int | str) else type(value).__name__


def _rounded(number: re.Match) -> str:
    value = float(number[0].replace(",", ""))
    return f"{value:.3g}" if abs(value) > 1e-9 else "0"
