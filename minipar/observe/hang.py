"""Why does this job hang? Explain what the ranks have noted of their calls.

Idea:   every rank notes its collectives by group and number. Look at the oldest open call of each
        group. A rank that has not called it *did not come*. A rank that is still in it while
        another rank has completed it is *behind*: its device is stuck. The rest are victims, and
        so is a late rank that waits for another rank elsewhere. The messages from one rank to
        another are a group of two.
Notes:  of PyTorch's flight recorder, which `tools.dumps` reads; or of our `watchdog`.
Limits: gloo records neither messages nor members: the members are the ranks that made calls.
        The recorder is a ring buffer: a call that it overwrote is unknown without ``pg_status``.
        Numbers and sizes at the two ends of a message are not compared.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp. In torch: ``torchfrtrace``.
Proved by tests/tools/test_hang.py, on dumps of jobs that hang.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, permutations
from typing import NamedTuple

from minipar.text import FOREIGN, names

MOST_LINES = 8  # of each part of the page

_ROOTED = re.compile(r"(\d+ x )?_?(broadcast|reduce|gather|scatter|all_?to_?all)(_oop|v|_base)?")
"""Verbs that may end on some ranks without others. No dump tells the root."""


@dataclass
class Entry:
    """One call of one rank. `number` counts within the group; messages count apart."""

    verb: str
    group: str
    number: int
    done: bool | None  # None: launched, and nobody knows whether it has ended
    data: str = ""  # the input: "4 Float"; empty if sizes may differ or are not known
    peer: int | None = None  # of a message: the other rank, as a number within the group
    stack: tuple[str, ...] = ()  # innermost call first
    begun: bool = False  # True if the recorder saw the call begin on the device
    splits: tuple[list[int], list[int]] | None = None  # of an all-to-all: items to and from each

    @property
    def call(self) -> tuple[str, int, bool]:
        """Return the key of the call: messages of one number begin together."""
        return self.group, self.number, self.peer is None


@dataclass
class Recording:
    """The notes of one rank. `groups`: name -> title, ranks (empty: not recorded)."""

    rank: int
    entries: list[Entry]
    groups: dict[str, tuple[str, tuple[int, ...]]]
    # group: the last call enqueued, and the last call completed; of groups whose status is known
    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    has_turned: bool = False  # True if older calls are not in the dump
    label: str = ""  # such as "rank 2 of 4 (dp=1, tp=0)"
    stack: tuple[str, ...] = ()  # where the rank is now, innermost call first

    @property
    def first(self) -> Entry | None:
        """The oldest open call: the later ones, of any group, may wait behind it. Or the last."""
        waiting = [entry for entry in self.entries if entry.done is False]
        return next(iter(waiting or self.entries[-1:]), None)


@dataclass(eq=False)
class Group:
    """The collectives of one process group, as ``calls[number][rank]``.

    Or messages from its first rank to its second: each of the two has its own numbers for these.
    """

    name: str
    key: str  # in the recordings
    ranks: tuple[int, ...]
    calls: dict[int, dict[int, Entry]] = field(default_factory=dict)
    is_message: bool = False

    @property
    def oldest(self) -> dict[int, Entry]:
        """The oldest open call of each rank that has one."""
        backwards = sorted(self.calls, reverse=True)
        return {r: e for n in backwards for r, e in self.calls[n].items() if e.done is False}

    def place(self, rank: int, number: int, recording: Recording | None) -> str:
        """Return where `rank` is at call `number`: "in", "past", "came", "absent", "unknown".

        "came" stands for "in" or "past". A rank that has left a message is "absent".
        """
        if recording is None:
            return "unknown"
        calls = {n: of_ranks[rank] for n, of_ranks in self.calls.items() if rank in of_ranks}
        if self.is_message:
            may_be_in = any(n >= number and entry.done is None for n, entry in calls.items())
            return "in" if rank in self.oldest else "came" if may_be_in else "absent"
        if number in calls:
            return {True: "past", False: "in", None: "came"}[calls[number].done]
        if not calls and recording.has_turned and self.key not in recording.last:
            return "unknown"  # a ring buffer that has wrapped around may have lost all calls
        ended = max((n for n, entry in calls.items() if entry.done), default=None)
        enqueued, ended = recording.last.get(self.key, (max(calls, default=0), ended))
        if number > enqueued:
            return "absent"
        return "came" if ended is None else "past" if number <= ended else "in"


class Finding(NamedTuple):
    """The kind of a verdict, its ranks, and a sentence for the report.

    "unlike": the ranks are to blame. "late": they did not come or are behind; they are to blame,
    unless they wait elsewhere. "unknown": no dump tells. "stuck": all ranks have called; this
    counts only if no rank is to blame.
    """

    kind: str
    ranks: list[int]
    text: str


@dataclass
class Report:
    """The diagnosis of the dumps; its `str` is a page. Without `findings`, nothing hangs."""

    recordings: dict[int, Recording]
    groups: list[Group]
    findings: list[str] = field(default_factory=list)  # those that count
    # by call, as "all_reduce #4 on dp": who waits there, and for which ranks
    waits: dict[str, dict[int, set[int]]] = field(default_factory=lambda: defaultdict(dict))
    blamed: list[int] = field(default_factory=list)  # the ranks that are to blame
    culprits: list[int] = field(default_factory=list)  # the blamed ranks and others worth a look

    def __str__(self) -> str:
        calls = sum(len(r.entries) for r in self.recordings.values())
        lines = [f"{calls:,} calls of {names(sorted(self.recordings))}"]
        silent = [rank for rank in self.culprits if rank not in self.recordings]
        if first := self.blamed or silent:
            lines.append(f"look at {names(first)} first")
        unseen = "not recorded are new_group, monitored_barrier and gloo's messages"
        lines += _most(self.findings) or [f"no hang: every recorded call has ended; {unseen}"]
        here = [rank for rank in self.culprits if rank in self.recordings]
        lines += [self._whereabouts(rank) for rank in here[: MOST_LINES // 2]]
        if silent:
            lines.append(f"\n{names(silent)}: nothing is known. Ended, stopped, or cut off?")
        if told := self._victims():
            lines += ["\nwho waits for whom:", *_most(told, 2 * MOST_LINES)]
        return "\n".join(lines)

    def _victims(self) -> list[str]:
        """Return a line for each call that ranks wait in."""
        lines = []
        for call, of in self.waits.items():
            whom = set().union(*of.values()) - of.keys()
            sure, unsure = sorted(whom & {*self.recordings}), sorted(whom - {*self.recordings})
            missing = [names(sure)] * bool(sure) + [f"perhaps {names(unsure)}"] * bool(unsure)
            end = " and ".join(missing) or "its end"
            lines.append(f"  {names(sorted(of))} in {call} -> {end}")
        return lines

    def _whereabouts(self, rank: int) -> str:
        """Return the oldest open call of a rank, or its last one, and its lines of code."""
        recording = self.recordings[rank]
        # A dump may hold the open calls alone.
        said = "it has ended all its calls" if recording.has_turned else "it has called nothing"
        stack: tuple[str, ...] = ()
        if call := recording.first:
            verb, stack = "it waits in" if call.done is False else "its last was", call.stack
            said = f"{verb} {call.verb} #{call.number} on {recording.groups[call.group][0]}"
        own = [line for line in stack if not FOREIGN.search(line)] or list(stack)
        here = "; it is here:" if recording.stack else ", called here:" if own else ""
        who = recording.label or f"rank {rank}"
        return "\n    ".join([f"\n{who}: {said}{here}", *(recording.stack or own)[:8]])


def _most(lines: list[str], most: int = MOST_LINES) -> list[str]:
    return lines[:most] + [f"... and {len(lines) - most} more"] * (len(lines) > most)


# ---------------------------------------------------------------------- explaining
def explain(recordings: dict[int, Recording]) -> Report:
    """Say who is to blame for a hang, and who waits for whom."""
    groups = _groups(recordings)
    report = Report(recordings, [group for group in groups if not group.is_message])
    said = [finding for group in groups for finding in _explain(group, report)]
    waits: dict[int, set[int]] = defaultdict(set)
    for rank, missing in chain.from_iterable(of.items() for of in report.waits.values()):
        waits[rank] |= missing
    ranks: dict[str, set[int]] = defaultdict(set)
    for finding in said:
        ranks[finding.kind] |= {*finding.ranks}
    blamed = ranks["unlike"] | (ranks["late"] - waits.keys())
    silent = ranks["unknown"] - blamed
    if not blamed | silent and (circle := _circle(waits)):
        links = ", which waits for ".join(f"rank {rank}" for rank in circle)
        report.findings.append(f"They wait in a circle: {links}.")
        blamed = {*circle}
    stuck = set() if blamed else ranks["stuck"]
    report.blamed = sorted(blamed)
    report.culprits = [*sorted(blamed | stuck), *sorted(silent - stuck)]
    look = dict(unlike=blamed, late=blamed, unknown=silent, stuck=stuck)
    for kind, those in look.items():
        report.findings += [f.text for f in said if f.kind == kind and {*f.ranks} & those]
    return report


def _groups(recordings: dict[int, Recording]) -> list[Group]:
    """Return all groups with the calls of their ranks, and a group for each way of messages.

    A call that splits a group gives all parts one name, so name *and* members identify a group.
    If the members are not recorded, take all ranks (default group) or the ranks that called.
    """
    everyone = tuple(range(max(recordings) + 1))
    groups: dict[tuple, Group] = {}
    for rank, recording in recordings.items():
        mine: dict[str, Group] = {}
        for key, (title, ranks) in recording.groups.items():
            members = everyone if title == "default_pg" and not ranks else ranks
            mine[key] = groups.setdefault((key, ranks), Group(title, key, members))
        for entry in recording.entries:
            group = mine[entry.group]
            if entry.peer is not None:
                known = entry.peer < len(group.ranks)
                ends = rank, group.ranks[entry.peer] if known else rank
                way = {"send": ends, "recv": ends[::-1]}.get(entry.verb, tuple(sorted(ends)))
                pair = Group(group.name, group.key, tuple(dict.fromkeys(way)), is_message=True)
                group = groups.setdefault((group.key, group.ranks, way), pair)
            group.calls.setdefault(entry.number, {})[rank] = entry
    titles = Counter(group.name for group in groups.values() if not group.is_message)
    for group in groups.values():
        group.ranks = group.ranks or tuple(sorted({*chain(*group.calls.values())}))
        group.name += f" of {names(group.ranks)}" * (group.is_message or titles[group.name] > 1)
    return sorted(groups.values(), key=lambda group: group.is_message)


def _explain(group: Group, report: Report) -> list[Finding]:
    """Find the ranks to blame at one call of the group, and note who waits.

    It is the oldest open call, as later ones hang due to it. Where none is open, it is the last.
    """
    recordings, oldest = report.recordings, group.oldest
    ended = (n for n, of in group.calls.items() if any(entry.done for entry in of.values()))
    number = min((entry.number for entry in oldest.values()), default=max(ended, default=0))
    if not (here := oldest if group.is_message else group.calls.get(number, {})):
        return []
    at: dict[str, list[int]] = defaultdict(list)
    for rank in group.ranks:
        at[group.place(rank, number, recordings.get(rank))].append(rank)
    held = {r for r in at["in"] if r in here and here[r].call != recordings[r].first.call}
    said = [*_verdicts(group, here, at, held)]
    late = {rank for f in said if f.kind == "late" for rank in f.ranks}
    named = {rank for f in said if f.kind != "stuck" for rank in f.ranks}
    for rank in sorted(oldest.keys() - late):
        missing = named if rank in held else named | held
        # Behind an older call, a call that the device has not begun is no wait of its own.
        if rank not in held or missing and oldest[rank].begun:
            call = f"{oldest[rank].verb} #{oldest[rank].number} on {group.name}"
            report.waits[call][rank] = missing
    return said


def _verdicts(
    group: Group, here: dict[int, Entry], at: dict[str, list[int]], held: set[int]
) -> Iterator[Finding]:
    """Find what is wrong with a call; `held` are ranks in it that an older call may hold up."""
    usual = here[odd_ones(here, "verb")[0][0]]
    call = f"{usual.verb} #{usual.number} on {group.name}"
    inside, past, absent, unknown = (at[place] for place in ("in", "past", "absent", "unknown"))
    if not inside:
        if absent and past and not _ROOTED.fullmatch(usual.verb):
            text = f"{names(absent)} did not come to {call}, which ended on {names(past)}: by an "
            yield Finding("late", absent, f"{text}error, or dumps are not of one moment.")
        return
    yield from (unlike := [] if group.is_message else [*_unlike(group, here, call)])
    begun = [rank for rank in inside if rank in here and here[rank].begun]
    idle = [rank for rank in inside if rank in here and not here[rank].begun]
    if absent:
        or_left = ", or has left it" * group.is_message
        yield Finding("late", absent, f"{names(absent)} did not come to {call}{or_left}.")
    elif unlike:
        pass
    elif past:
        text = f"behind: {names(inside)}, still in {call}, which {names(past)} ended."
        yield Finding("late", inside, text)
    elif begun and idle:
        text = f"behind: {names(idle)}, where {call} has not begun, as it has on {names(begun)}."
        yield Finding("late", idle, text)
    elif not unknown and not held:
        hint = " Who else is in that group, the dumps do not say." * (len(group.ranks) == 1)
        yield Finding("stuck", inside, f"All have called {call}, and it does not end.{hint}")
    if unknown:
        yield Finding("unknown", unknown, f"Whether {names(unknown)} came to {call} is unknown.")


def odd_ones(here: dict[int, Entry], what: str) -> tuple[list[int], list[int]]:
    """Return the ranks with the usual "verb" or "data", and the ranks with another one.

    The usual value is the value of most ranks; at a tie, the value of the lowest rank.
    """
    gave = {rank: getattr(entry, what) for rank, entry in here.items()}
    usual = Counter(gave.values()).most_common(1)[0][0]
    # Data are empty where they may differ, or are not known.
    odd = [rank for rank in gave if gave[rank] and usual and gave[rank] != usual]
    return [rank for rank in gave if gave[rank] == usual], odd


def _unlike(group: Group, here: dict[int, Entry], call: str) -> Iterator[Finding]:
    """Find ranks that call another verb, give other data, or split an all-to-all otherwise."""
    like, odd = odd_ones(here, "verb")
    for rank in odd:
        text = f"rank {rank} called {here[rank].verb} where {names(like)} called {call}."
        yield Finding("unlike", [like[0], rank], text)
    if odd:
        return
    like, odd = odd_ones(here, "data")
    for rank in odd:
        text = f"rank {rank} gave {here[rank].data} to {call}, {names(like)} gave "
        blamed = [rank] if len(like) > len(odd) else [like[0], rank]
        yield Finding("unlike", blamed, text + f"{here[like[0]].data}.")
    for a, b in permutations([rank for rank in here if here[rank].splits], 2):
        (sent, _), (_, taken) = here[a].splits, here[b].splits
        i, j = group.ranks.index(a), group.ranks.index(b)
        if len(sent) == len(taken) == len(group.ranks) and sent[j] != taken[i]:
            text = f"rank {a} sends {sent[j]} items to rank {b} in {call}, which expects "
            yield Finding("unlike", [a, b], text + f"{taken[i]}.")


def _circle(waits: dict[int, set[int]]) -> list[int]:
    """Return ranks that wait in a circle, the first rank again at the end; empty if none."""
    for start in sorted(waits):
        way = [start]
        while waits.get(way[-1]) and way[-1] not in way[:-1]:
            way.append(min(waits[way[-1]]))
        if way[-1] in way[:-1]:
            return way[way.index(way[-1]) :]
    return []
