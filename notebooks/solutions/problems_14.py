"""Problems from real clusters, for notebook 14: diagnosis."""

from minipar.lab.problems import problem

LLAMA_3_GPUS, LLAMA_3_DAYS, LLAMA_3_FAULTS = 16_384, 54, 419
HOURS_BETWEEN_FAULTS = LLAMA_3_DAYS * 24 / LLAMA_3_FAULTS


@problem(
    "How reliable a single GPU is",
    unit="years",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.4 and table 5",
    hint="How long did all GPUs run together? Each fault used up its share of that.",
    slips={
        "Planned ones are no faults: 419, not 466.": 16_384 * 54 / 466 / 365.25,
        "That is in days.": 16_384 * 54 / 419,
        "That is of the whole cluster, in hours: a GPU runs 16,384 times as long.": 54 * 24 / 419,
    },
    lesson="A machine with one GPU hardly ever fails. The cluster failed every three hours.",
)
def years_of_a_gpu():
    """In 54 days of training Llama 3 405B on 16,384 GPUs there were 466 interruptions: 47 planned
    ones, and 419 unplanned ones. Count all of the unplanned ones against the GPUs: how many years
    would one GPU run, on average, between two of them?"""
    return LLAMA_3_GPUS * LLAMA_3_DAYS / LLAMA_3_FAULTS / 365.25


@problem(
    "The same GPUs, a hundred thousand of them",
    unit="minutes",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), table 5; the larger cluster is our own",
    hint="How does the time between faults change with the number of GPUs?",
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
    return 60 * HOURS_BETWEEN_FAULTS * LLAMA_3_GPUS / 100_000


@problem(
    "GPUs of 2022, and of 2024",
    unit="times",
    source=(
        "[OPT](https://arxiv.org/abs/2205.01068), section 2.5, and "
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 5; two months are 60 days here"
    ),
    hint="For both clusters: how many GPU-days, and how many faults?",
    slips={
        "Per GPU: the clusters are of different sizes.": (54 / 419) / (60 / 105),
        "There were automatic restarts as well: 105 in all.": (16_384 * 54 / 419) / (992 * 60 / 35),
        "The other way round: who runs for longer?": (992 * 60 / 105) / (16_384 * 54 / 419),
    },
    lesson="Interruptions per GPU became rarer, but clusters grew faster still.",
)
def longer_than_opt():
    """OPT-175B ran on 992 GPUs for two months, with 35 manual restarts and about 70 automatic
    ones, for faults of the hardware. Llama 3 was interrupted 419 times in 54 days on 16,384 GPUs,
    for unplanned reasons of any kind. How many GPU-days passed between two interruptions of Llama
    3, as a multiple of OPT's?"""
    return (LLAMA_3_GPUS * LLAMA_3_DAYS / LLAMA_3_FAULTS) / (992 * 60 / (35 + 70))


@problem(
    "What an interruption may cost",
    unit="minutes",
    source="[Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.4",
    hint="How much time may be lost in all, and by how many interruptions is it shared?",
    slips={
        "All interruptions stop the run, planned ones too.": 0.1 * 54 * 24 * 60 / 419,
        "That is what is left for training between two of them.": 0.9 * 54 * 24 * 60 / 466,
    },
    lesson="To notice, to find the cause, to restart, and to compute again what was not saved.",
)
def minutes_lost():
    """Llama 3 trained for more than 90 % of 54 days, despite 466 interruptions. How many
    minutes could one interruption cost at most, on average, if nothing else cost any time?"""
    return 0.1 * LLAMA_3_DAYS * 24 * 60 / 466


@problem(
    "A checkpoint every half hour",
    unit="% of the time",
    source=(
        "[Young 1974](https://doi.org/10.1145/361147.361115), for both costs; faults of "
        "[Llama 3](https://arxiv.org/abs/2407.21783), table 5"
    ),
    hint=(
        "Two shares: one of the interval between two checkpoints, one of the time "
        "between two faults."
    ),
    slips={
        "Half an interval is lost on average, not all of it.": 100 * (30 / 1800 + 1800 / 11_135),
        "Saving takes time, too.": 100 * 900 / 11_135,
        "Faults cost time, too: the work since the last checkpoint.": 100 * 30 / 1800,
    },
    lesson="By Young's rule (P12.4) 13.6 minutes are best: saving then costs as much as faults do.",
)
def share_lost():
    """Saving a checkpoint stops training for 30 seconds (our assumption), and faults come every
    3.093 hours. After a fault, all steps since the last checkpoint are computed again: half an
    interval on average. With a checkpoint every 30 minutes, how many per cent of the time go into
    saving and into steps that are computed again?"""
    interval, fault = 30 * 60, HOURS_BETWEEN_FAULTS * 3600
    return 100 * (30 / interval + interval / 2 / fault)
