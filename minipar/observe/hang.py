"""Why does this job hang? Explain what the ranks have noted of their calls.

Idea:   every rank notes its collectives by group and number. Look at the oldest open call of each
        group. A rank that has not called it *did not come*. A rank that is still in it while
        another rank has completed it is *behind*: its device is stuck. The rest are victims, and
        so is a rank that did not come because it waits for another rank elsewhere.
Notes:  of PyTorch's flight recorder, which `tools.dumps` reads; or of our `watchdog`.
Limits: gloo records neither messages nor members: the members are the ranks that made calls.
        The recorder is a ring buffer: a call that it overwrote is unknown without ``pg_status``.
        The two ends of a message are not compared: a rank in a message waits for the other rank.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp. In torch: ``torchfrtrace``.
Proved by tests/tools/test_hang.py, on dumps of jobs that hang.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, permutations
from typing import NamedTuple

from minipar.observe.spans import Interval
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


@dataclass
class Recording:
    """The notes of one rank. `groups`: name -> description, ranks (empty: not recorded)."""

    rank: int
    entries: list[Entry]
    groups: dict[str, tuple[str, tuple[int, ...]]]
    # group: the last call enqueued, and the last call completed (None if unknown)
    last: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)  # groups in which `last` counts messages, too
    has_turned: bool = False  # True if older calls are not in the dump
    when: Interval = (0.0, math.inf)  # its first call, and when its last one times out; nanoseconds
    label: str = ""  # such as "rank 2 of 4 (dp=1, tp=0)"
    stack: tuple[str, ...] = ()  # where the rank is now, innermost call first

    @property
    def first(self) -> Entry | None:
        """The oldest open call, over all groups: the later ones may wait behind it."""
        return next((entry for entry in self.entries if entry.done is False), None)

    def title(self, group: str) -> str:
        """Return the description of a group, else its name."""
        desc = self.groups[group][0]
        return f"group {group}" if desc in ("", "undefined") else desc


@dataclass(eq=False)
class Group:
    """The calls of one process group: collectives as ``calls[number][rank]``, messages apart."""

    name: str
    key: str  # in the recordings
    ranks: tuple[int, ...]
    is_mixed: bool = False  # True if some rank's status of the group counts messages as well
    calls: dict[int, dict[int, Entry]] = field(default_factory=dict)
    messages: dict[tuple[int, int], list[Entry]] = field(default_factory=dict)  # by rank and peer

    @property
    def oldest(self) -> dict[int, Entry]:
        """The oldest open call of each rank that has one."""
        backwards = sorted(self.calls, reverse=True)
        return {r: e for n in backwards for r, e in self.calls[n].items() if e.done is False}

    @property
    def ended(self) -> int:
        """The latest call that has ended on some rank, or 0."""
        has_ended = (n for n, of in self.calls.items() if any(e.done for e in of.values()))
        return max(has_ended, default=0)

    def place(self, rank: int, number: int, recording: Recording | None) -> str:
        """Return where `rank` is at call `number`: "in", "came", "past", "absent", "unknown"."""
        if recording is None:
            return "unknown"
        calls = {n: of_ranks[rank] for n, of_ranks in self.calls.items() if rank in of_ranks}
        enqueued, completed = recording.last.get(self.key, (-1, -1))
        if self.is_mixed:
            enqueued = completed = -1
        if number in calls:
            return {True: "past", False: "in", None: "came"}[calls[number].done]
        if number > max([enqueued, *calls]):
            # A ring buffer that has wrapped around may have lost all calls of this group.
            is_sure = calls or enqueued >= 0 or not recording.has_turned
            return "absent" if is_sure else "unknown"
        if enqueued >= 0:
            return "came" if completed is None else "past" if completed >= number else "in"
        has_ended = any(n > number and e.done for n, e in calls.items())
        return "past" if has_ended or not recording.has_turned else "unknown"


class Finding(NamedTuple):
    """The kind of a verdict, its ranks, and a sentence for the report.

    "unlike" and "behind": the ranks are to blame. "absent": the ranks are to blame, unless they
    wait elsewhere. "stuck": all ranks have called; this counts only if no rank is to blame.
    "unknown": no dump tells.
    """

    kind: str
    ranks: list[int]
    text: str


@dataclass
class Report:
    """The diagnosis of the dumps; its `str` is a page. Without `findings`, nothing hangs."""

    recordings: dict[int, Recording]
    groups: list[Group]
    said: list[Finding] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)  # those that count
    # by call, as "all_reduce #4 on dp" or "messages on dp": who waits there, and for which ranks
    waits: dict[str, dict[int, set[int]]] = field(default_factory=lambda: defaultdict(dict))
    blamed: list[int] = field(default_factory=list)  # the ranks that are to blame
    culprits: list[int] = field(default_factory=list)  # the blamed ranks and others worth a look

    def __str__(self) -> str:
        calls = sum(len(r.entries) for r in self.recordings.values())
        lines = [f"{calls:,} calls of {names(sorted(self.recordings))}"]
        silent = [rank for rank in self.culprits if rank not in self.recordings]
        few = silent if len(silent) < len(self.recordings) else []
        if first := self.blamed or few:
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
        """Return a line for each call that ranks wait in, and one for all messages of a group."""
        lines = []
        for call, of in self.waits.items():
            whom = set().union(*of.values())
            sure, unsure = sorted(whom & {*self.recordings}), sorted(whom - {*self.recordings})
            missing = [names(sure)] * bool(sure) + [f"perhaps {names(unsure)}"] * bool(unsure)
            end = " and ".join(missing) or "its end"
            lines.append(f"  {names(sorted(of))} in {call} -> {end}")
        return lines

    def _whereabouts(self, rank: int) -> str:
        """Return the oldest open call of a rank, or its last one, and its lines of code."""
        recording = self.recordings[rank]
        entries = recording.entries
        last = recording.first or (entries[-1] if entries else None)
        # A dump may hold only the open calls, and a status for the ended calls.
        said = "it has ended all its calls" if recording.last else "it has called nothing"
        if last:
            verb = "it waits in" if last.done is False else "its last was"
            said = f"{verb} {last.verb} #{last.number} on {recording.title(last.group)}"
        stack = last.stack if last else ()
        own = [line for line in stack if not FOREIGN.search(line)] or list(stack)
        here = "; it is here:" if recording.stack else ", called here:" if own else ""
        who = recording.label or f"rank {rank}"
        return "\n    ".join([f"\n{who}: {said}{here}", *(recording.stack or own)[:8]])


def _most(lines: list[str], most: int = MOST_LINES) -> list[str]:
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return lines[:most] + more


# ---------------------------------------------------------------------- explaining
def explain(recordings: dict[int, Recording]) -> Report:
    """Say who is to blame for a hang, and who waits for whom."""
    report = Report(recordings, _groups(recordings))
    for explaining in (_explain_calls, _explain_messages):
        for group in report.groups:
            explaining(group, report)
    waits: dict[int, set[int]] = defaultdict(set)
    for rank, missing in chain.from_iterable(of.items() for of in report.waits.values()):
        waits[rank] |= missing
    ranks: dict[str, set[int]] = defaultdict(set)
    for finding in report.said:
        ranks[finding.kind] |= {*finding.ranks}
    blamed = ranks["unlike"] | ranks["behind"] | (ranks["absent"] - waits.keys())
    silent = ranks["unknown"] - blamed
    if not blamed | silent and (circle := _circle(waits)):
        links = ", which waits for ".join(f"rank {rank}" for rank in circle)
        report.findings.append(f"They wait in a circle: {links}.")
        blamed = {*circle}
    stuck = set() if blamed else ranks["stuck"]
    report.blamed = sorted(blamed)
    report.culprits = [*sorted(blamed | stuck), *sorted(silent)]
    look = dict(unlike=blamed, behind=blamed, absent=blamed, unknown=silent, stuck=stuck)
    for kind, those in look.items():
        report.findings += [f.text for f in report.said if f.kind == kind and {*f.ranks} & those]
    return report


def _groups(recordings: dict[int, Recording]) -> list[Group]:
    """Return all groups, with the calls and messages of their ranks.

    A call that splits a group gives all parts one name, so name *and* members identify a group.
    If the members are not recorded, take all ranks (default group) or the ranks that called.
    """
    everyone = tuple(range(max(recordings) + 1))
    groups: dict[tuple, Group] = {}
    for rank, recording in recordings.items():
        mine: dict[str, Group] = {}
        for key, (desc, ranks) in recording.groups.items():
            members = everyone if desc == "default_pg" and not ranks else ranks
            group = Group(recording.title(key), key, members)
            mine[key] = groups.setdefault((key, ranks), group)
            mine[key].is_mixed |= key in recording.mixed
        for entry in recording.entries:
            group = mine[entry.group]
            group.ranks = tuple(sorted({*group.ranks, rank}))
            if entry.peer is None:
                group.calls.setdefault(entry.number, {})[rank] = entry
            else:
                group.messages.setdefault((rank, entry.peer), []).append(entry)
    titles = Counter(group.name for group in groups.values())
    for group in groups.values():
        group.name += f" of {names(group.ranks)}" * (titles[group.name] > 1)
    return [*groups.values()]


def _explain_calls(group: Group, report: Report) -> None:
    """Find the ranks to blame at the oldest open call of the group. Later calls hang due to it."""
    if ended := group.ended:
        at, verb = _at(group, ended, report), next(iter(group.calls[ended].values())).verb
        if at["absent"] and not _ROOTED.fullmatch(verb):
            text = f"{names(at['absent'])} did not come to {verb} #{ended} on {group.name}, which "
            text += f"ended on {names(at['past'])}: by an error, or dumps are not of one moment."
            report.said.append(Finding("absent", at["absent"], text))
            return
    if not (oldest := group.oldest):
        return
    number = min(entry.number for entry in oldest.values())
    at, here = _at(group, number, report), group.calls[number]
    first = {rank for rank in at["in"] if here.get(rank) in (None, report.recordings[rank].first)}
    held = {*at["in"]} - first
    said = [*_verdicts(group, number, at, held)]
    # The status may name an open call whose entry the ring buffer has overwritten.
    oldest = dict.fromkeys(at["in"], next(iter(here.values()))) | oldest
    report.said += said
    blamed = {rank for f in said if f.kind in ("behind", "absent") for rank in f.ranks}
    named = {rank for f in said if f.kind != "stuck" for rank in f.ranks}
    calls = {r: f"{e.verb} #{e.number} on {group.name}" for r, e in oldest.items()}
    for rank in sorted(calls.keys() - blamed):
        missing = named - {other for other in calls.keys() - blamed if calls[other] == calls[rank]}
        report.waits[calls[rank]][rank] = missing | (held if rank in first else set())


def _at(group: Group, number: int, report: Report) -> dict[str, list[int]]:
    """Return the ranks of the group by their place at a call, as `Group.place` names it."""
    at: dict[str, list[int]] = defaultdict(list)
    for rank in group.ranks:
        at[group.place(rank, number, report.recordings.get(rank))].append(rank)
    return at


def _verdicts(
    group: Group, number: int, at: dict[str, list[int]], held: set[int]
) -> Iterator[Finding]:
    """Find what is wrong with a call; `held` are ranks in it that an older call may hold up."""
    here = group.calls[number]
    usual = here[odd_ones(here, "verb")[0][0]].verb
    call = f"{usual} #{number} on {group.name}"
    yield from (unlike := [*_unlike(group, here, call)])
    idle = [rank for rank in at["in"] if rank in here and not here[rank].begun]
    begun = [rank for rank in at["in"] if rank in here and here[rank].begun]
    if absent := at["absent"]:
        yield Finding("absent", absent, f"{names(absent)} did not come to {call}.")
    elif unlike:
        pass
    elif at["past"]:
        kind = "absent" if _ROOTED.fullmatch(usual) else "behind"
        text = f"behind: {names(at['in'])}, still in {call}, which {names(at['past'])} ended."
        yield Finding(kind, at["in"], text)
    elif begun and idle:
        text = f"behind: {names(idle)}, where {call} has not begun, as it has on {names(begun)}."
        own = [rank for rank in idle if rank not in held]
        yield Finding("behind" if own else "absent", own or idle, text)
    elif not at["unknown"] and not held:
        hint = " Who else is in that group, the dumps do not say." * (len(group.ranks) == 1)
        yield Finding("stuck", at["in"], f"All have called {call}, and it does not end.{hint}")
    if unknown := at["unknown"]:
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


# ---------------------------------------------------------------------- messages
def _explain_messages(group: Group, report: Report) -> None:
    """Note that each rank waits for the other rank of its oldest open messages.

    The send of a small message ends before its receive, so its sender may wait in no call.
    """
    for (rank, number), messages in group.messages.items():
        if not (here := [m for m in messages if m.done is False]):
            continue
        first = here[0].number
        peer = group.ranks[number] if number < len(group.ranks) else None
        there = group.messages.get((peer, group.ranks.index(rank)), [])
        verbs = " + ".join(m.verb for m in here if m.number == first)
        if peer is None:
            kind, named, end = "stuck", rank, "a rank that the dumps do not tell"
        elif peer not in report.recordings:
            kind, named, end = "unknown", peer, f"rank {peer}, of which nothing is known"
        elif any(m.done is False or m.done is None and m.number >= first for m in there):
            if here[0] is not report.recordings[rank].first:
                continue  # it may wait behind an older call
            if report.recordings[peer].first not in (None, *there):  # so may the other end
                report.waits[f"messages on {group.name}"].setdefault(rank, set()).add(peer)
                continue
            kind, named, end = "stuck", rank, f"rank {peer}, which is in one with rank {rank}"
        else:
            kind, named, end = "absent", peer, f"rank {peer}, where it is not called, or has left"
        call = f"{verbs} #{first} on {group.name}"
        report.said.append(Finding(kind, [named], f"rank {rank} waits in {call} with {end}."))
        report.waits[f"messages on {group.name}"].setdefault(rank, set()).update({peer} - {None})


def _circle(waits: dict[int, set[int]]) -> list[int]:
    """Return ranks that wait in a circle, the first rank again at the end; empty if none."""
    for start in sorted(waits):
        way = [start]
        while waits.get(way[-1]) and way[-1] not in way[:-1]:
            way.append(min(waits[way[-1]]))
        if way[-1] in way[:-1]:
            return way[way.index(way[-1]) :]
    return []
