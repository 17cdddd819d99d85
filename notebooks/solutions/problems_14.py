"""Problems from real clusters, for notebook 14: diagnosis."""

from math import sqrt

from minipar.lab.problems import problem

LLAMA_3_GPUS, LLAMA_3_DAYS, LLAMA_3_FAULTS = 16_384, 54, 419


@problem(
    "How long until something breaks",
    unit="hours",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.4 and table 5",
    hint="54 days have 1,296 hours.",
    slips={
        "Planned ones are no faults: 419, not 466.": 54 * 24 / 466,
        "That is how many there are in a day.": 419 / 54,
    },
    lesson="On average. A debugger has to be at hand at any hour, and to be a program.",
)
def hours_between_faults():
    """In 54 days of training Llama 3 405B on 16,384 GPUs there were 466 interruptions, of which
    47 were planned and 419 were not. How many hours passed between two unplanned ones?"""
    return LLAMA_3_DAYS * 24 / LLAMA_3_FAULTS


@problem(
    "The same GPUs, a hundred thousand of them",
    unit="minutes",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), table 5; the larger cluster is our own",
    hint="Six times as many GPUs break six times as often.",
    slips={
        "That is for 16,384 GPUs: more of them break more often.": 54 * 24 * 60 / 419,
        "More GPUs break more often, not more rarely.": 54 * 24 * 60 / 419 * 100_000 / 16_384,
    },
    lesson="A restart of ten minutes would take a third of the time.",
)
def minutes_between_faults():
    """Suppose that 100,000 GPUs break as often, each, as the 16,384 of Llama 3 did (419 times in
    54 days, all together), and that any of them stops the run. How many minutes pass between two
    interruptions?"""
    return 60 * hours_between_faults.work() * LLAMA_3_GPUS / 100_000


@problem(
    "GPUs of 2022, and of 2024",
    unit="times",
    source=(
        "[OPT](https://arxiv.org/abs/2205.01068), section 2.5, and "
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 5; two months are 60 days here"
    ),
    hint="GPUs times days, divided by restarts, for both.",
    slips={
        "Per GPU: the clusters are of different sizes.": (54 / 419) / (60 / 105),
        "There were automatic restarts as well: 105 in all.": (16_384 * 54 / 419) / (992 * 60 / 35),
        "The other way round: who runs for longer?": (992 * 60 / 105) / (16_384 * 54 / 419),
    },
    lesson="GPUs became more reliable, and clusters grew faster than that.",
)
def longer_than_opt():
    """OPT-175B ran on 992 GPUs for two months, with 35 manual restarts and about 70 automatic
    ones, for faults of the hardware. Llama 3 was interrupted 419 times in 54 days on 16,384 GPUs.
    How many times as long did a GPU of Llama 3 run, between two interruptions that it was the cause
    of, as one of OPT?"""
    return (LLAMA_3_GPUS * LLAMA_3_DAYS / LLAMA_3_FAULTS) / (992 * 60 / (35 + 70))


@problem(
    "What an interruption may cost",
    unit="minutes",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.4",
    hint="A tenth of 54 days, shared by 466 interruptions.",
    slips={
        "All interruptions stop the run, planned ones too.": 0.1 * 54 * 24 * 60 / 419,
        "That is what is left for training between two of them.": 0.9 * 54 * 24 * 60 / 466,
    },
    lesson="To notice, to find the cause, to restart, and to compute again what was not saved.",
)
def minutes_lost():
    """Llama 3 trained for more than 90 % of 54 days, despite 466 interruptions. How many minutes
    was one allowed to cost at most, on average, if nothing else had cost any time?"""
    return 0.1 * LLAMA_3_DAYS * 24 * 60 / 466


@problem(
    "How often to save",
    unit="minutes",
    source=(
        "[Young 1974](https://doi.org/10.1145/361147.361115); faults of "
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 5"
    ),
    hint="Both times in seconds: the root of 2 times 30 times 11,136.",
    slips={
        "The factor of 2 is missing under the root.": sqrt(30 * 11_135.5) / 60,
        "That is half of it: is 30 under the root, and not 15 or 7.5?": sqrt(0.5 * 30 * 11_135.5)
        / 60,
    },
    lesson="Too seldom costs steps that are computed again, too often costs saving.",
)
def minutes_between_checkpoints():
    """Saving a checkpoint stops training for S = 30 seconds (our assumption), and faults come every
    F = 3.093 hours. By Young's rule the best time between two checkpoints is the root of 2 S F. How
    many minutes is that?"""
    return sqrt(2 * 30 * hours_between_faults.work() * 3600) / 60
