"""Why does this job hang? Explain what PyTorch's flight recorder, or our watchdog, wrote down.

Idea:   every rank notes its collectives by group and number. Look at the oldest open call of each
        group. A rank that has not called it *did not come*. A rank that is still in it while
        another rank has completed it is *behind*: its device is stuck. The rest are victims, and
        so is a rank that did not come because it waits for another rank elsewhere.
Files:  see `dumps`: one per rank, of the recorder; or the ``stalled.json`` of `minipar train`.
Limits: gloo records neither messages nor members: members are the ranks that ever called there.
        The recorder is a ring: without ``pg_status``, a call that fell out of it is unknown.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp. In torch: ``torchfrtrace``.
Proved by tests/tools/test_hang.py, on dumps of jobs that hang.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

from minipar.observe.watchdog import names
from minipar.tools.dumps import Entry, Recording

MOST_LINES = 8  # of each part of the page

_ROOTED = re.compile(r"_?(broadcast|reduce|gather|scatter)(_oop)?")
"""Verbs that end earlier on some ranks than on others."""
_FOREIGN = re.compile(r"(site|dist)-packages/|/torch/|/(threading|runpy|contextlib)\.py:|^<")


@dataclass(eq=False)
class Group:
    """The collectives of one process group, as ``calls[rank][number]``."""

    name: str
    key: str  # in the recordings
    ranks: tuple[int, ...]
    calls: dict[int, dict[int, Entry]] = field(default_factory=dict)
    odd: set[tuple[int, int]] = field(default_factory=set)  # (rank, number) unlike the others'

    def open_calls(self, rank: int) -> list[int]:
        """Return the numbers of the calls of `rank` that have not ended."""
        return [n for n, entry in self.calls.get(rank, {}).items() if not entry.done]

    def place(self, rank: int, number: int, recording: Recording | None) -> str:
        """Return where `rank` is at call `number`: "in", "past", "absent" or "unknown"."""
        if recording is None or recording.silence:
            return "unknown"
        calls, waiting = self.calls.get(rank, {}), self.open_calls(rank)
        enqueued, completed = recording.last.get(self.key, (-1, -1))
        if number in calls:
            return "in" if number in waiting else "past"
        if max([enqueued, *calls]) < number:
            # An empty ring that has turned proves nothing: the call may have fallen out of it.
            is_sure = calls or enqueued >= 0 or not recording.has_turned
            return "absent" if is_sure else "unknown"
        if enqueued >= 0:
            return "past" if completed >= number else "in"
        has_ended = any(n > number for n in {*calls} - {*waiting}) or not recording.has_turned
        return "past" if has_ended else "unknown"


class Wait(NamedTuple):
    """`rank` waits in `call` for those `missing`."""

    rank: int
    call: str
    missing: set[int]
    group: str
    is_message: bool = False


class Finding(NamedTuple):
    """The kind of a verdict, its ranks, and the sentence that says it.

    "sure": the ranks are to blame. "accused": they are, unless they wait elsewhere. "stuck": all
    have called, which tells something only where nobody is to blame. "unknown": no dump tells.
    """

    kind: str
    ranks: list[int]
    text: str


@dataclass
class Report:
    """The diagnosis of the dumps; its `str` is a page. Without `findings`, nothing hangs."""

    recordings: dict[int, Recording]
    groups: list[Group]
    findings: list[str] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    blamed: list[int] = field(default_factory=list)  # the ranks that are to blame
    culprits: list[int] = field(default_factory=list)  # and others worth a look

    def __str__(self) -> str:
        calls = sum(len(r.entries) for r in self.recordings.values())
        lines = [f"{calls:,} calls of {names(sorted(self.recordings))}"]
        lines += [f"look at {names(self.blamed)} first"] if self.blamed else []
        lines += _most(self.findings) or ["no hang: every recorded call has ended"]
        here = [rank for rank in self.culprits if rank in self.recordings]
        lines += [self._whereabouts(rank) for rank in here[: MOST_LINES // 2]]
        if silent := [rank for rank in self.culprits if rank not in self.recordings]:
            lines.append(f"\n{names(silent)}: no dump. Ended, stopped, or the file elsewhere?")
        if told := self._victims():
            lines += ["\nwho waits for whom:", *_most(told, 2 * MOST_LINES)]
        return "\n".join(lines)

    def knows(self, rank: int) -> bool:
        """Return True if anything can be said of the calls of that rank."""
        return rank in self.recordings and not self.recordings[rank].silence

    def _victims(self) -> list[str]:
        """Return a line for each call that ranks wait in, and one for all messages of a group."""
        who, whom = defaultdict(set), defaultdict(set)
        for wait in self.waits:
            call = f"{'messages' if wait.is_message else wait.call} on {wait.group}"
            who[call].add(wait.rank)
            whom[call] |= wait.missing
        lines = []
        for call, ranks in who.items():
            sure = sorted(rank for rank in whom[call] if self.knows(rank))
            unsure = sorted(whom[call] - {*sure})
            missing = [names(sure)] * bool(sure) + [f"perhaps {names(unsure)}"] * bool(unsure)
            end = " and ".join(missing) or "its end"
            lines.append(f"  {names(sorted(ranks))} in {call} -> {end}")
        return lines

    def _whereabouts(self, rank: int) -> str:
        """Return the oldest open call of a rank, or its last one, and its lines of code."""
        recording = self.recordings[rank]
        waiting = [entry for entry in recording.entries if not entry.done]
        last = next(iter(waiting or recording.entries[-1:]), None)
        # A dump may hold open calls alone, and a status of the others.
        ended = "it has ended all its calls" if recording.last else "it has called nothing"
        said = recording.silence or ended
        if last is not None:
            verb = "its last was" if last.done else "it waits in"
            said = f"{verb} {last.verb} #{last.number} on {recording.title(last.group)}"
        stack = recording.stack or (last.stack if last else ())
        own = [line for line in stack if not _FOREIGN.search(line)] or list(stack)
        where = f" on {recording.host}" if recording.host else ""
        here = ("; it is here:" if recording.stack else ", called here:") if own else ""
        return "\n    ".join([f"\nrank {rank}{where}: {said}{here}", *own[:8]])


def _most(lines: list[str], most: int = MOST_LINES) -> list[str]:
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return lines[:most] + more


# ---------------------------------------------------------------------- explaining
def explain(recordings: dict[int, Recording]) -> Report:
    """Say who is to blame for a hang, and who waits for whom."""
    groups = _grouped(recordings)
    report = Report(recordings, list(dict.fromkeys(groups.values())))
    said = [finding for group in report.groups for finding in _explain_group(group, report)]
    said += _explain_messages(groups, report)
    report.waits.sort(key=lambda wait: wait.rank)
    waits: dict[int, set[int]] = defaultdict(set)
    for wait in report.waits:
        waits[wait.rank] |= wait.missing - {wait.rank}
    ranks: dict[str, set[int]] = defaultdict(set)
    for finding in said:
        ranks[finding.kind] |= {*finding.ranks}
    blamed = ranks["sure"] | (ranks["accused"] - waits.keys())
    silent = ranks["unknown"] - blamed
    if not blamed | silent and (circle := _circle(waits)):
        links = ", which waits for ".join(f"rank {rank}" for rank in circle)
        report.findings.append(f"They wait in a circle: {links}.")
        blamed = {*circle}
    stuck = set() if blamed else ranks["stuck"]
    report.blamed = sorted(blamed)
    report.culprits = [*sorted(blamed | stuck), *sorted(silent)]
    for kind, those in dict(sure=blamed, accused=blamed, stuck=stuck, unknown=silent).items():
        report.findings += [f.text for f in said if f.kind == kind and {*f.ranks} & those]
    report.findings = report.findings or [f.text for f in said]  # some call is open: a hang
    return report


def _grouped(recordings: dict[int, Recording]) -> dict[tuple[int, str], Group]:
    """Return the group that each rank means by each name.

    A call that splits a group gives all parts one name, so name *and* members make a group.
    Members that are not recorded are all ranks of the default group, else the ranks that called.
    """
    everyone = tuple(range(max(recordings) + 1))
    groups: dict[tuple, Group] = {}
    found: dict[tuple[int, str], Group] = {}
    for rank, recording in recordings.items():
        for name, (desc, ranks) in recording.groups.items():
            members = everyone if desc == "default_pg" and not ranks else ranks
            group = Group(recording.title(name), name, members)
            found[rank, name] = groups.setdefault((name, ranks), group)
        for entry in recording.entries:
            group = found[rank, entry.group]
            group.ranks = tuple(sorted({*group.ranks, rank}))
            if entry.peer is None:
                group.calls.setdefault(rank, {})[entry.number] = entry
    titles = [group.name for group in groups.values()]
    for group in groups.values():
        group.name += f" of {names(group.ranks)}" * (titles.count(group.name) > 1)
    return found


def _explain_group(group: Group, report: Report) -> list[Finding]:
    """Find who is to blame at the oldest open call of the group. What comes later follows."""
    oldest = {r: min(group.open_calls(r)) for r in group.ranks if group.open_calls(r)}
    if not oldest:
        return []
    number = min(oldest.values())
    at: dict[str, list[int]] = defaultdict(list)
    for rank in group.ranks:
        at[group.place(rank, number, report.recordings.get(rank))].append(rank)
    inside, unknown = at["in"], at["unknown"]
    here = {r: calls[number] for r, calls in group.calls.items() if number in calls}
    usual = _commonest(entry.verb for entry in here.values())
    call = f"{usual} #{number} on {group.name}"
    said = _unlike(group, here, number, call)
    # A call that is no longer in the ring counts as begun: nothing says otherwise.
    begun = [r for r in inside if r in here and here[r].begun]
    idle = [r for r in inside if r in here and not here[r].begun]
    blamed, kind, text = [], "accused", ""
    if at["absent"]:
        blamed, text = at["absent"], f"{names(at['absent'])} did not come to {call}."
    elif at["past"] and not said:
        blamed, kind = inside, "accused" if _ROOTED.fullmatch(usual) else "sure"
        text = f"behind: {names(inside)}, still in {call}, which {names(at['past'])} ended."
    elif begun and idle and not said:
        blamed = idle
        text = f"behind: {names(idle)}, where {call} has not begun, as it has on {names(begun)}."
    if blamed:
        said.append(Finding(kind, blamed, text))
    if unknown:
        text = f"Whether {names(unknown)} came to {call} is unknown."
        said.append(Finding("unknown", unknown, text))
    if not said:
        alone = " Who else is in that group, the dumps do not say." * (len(group.ranks) == 1)
        text = f"All have called {call}, and it does not end.{alone}"
        said.append(Finding("stuck", inside, text))
    for rank in sorted({*inside, *oldest} - {*blamed}):
        n = oldest.get(rank, number)
        verb = group.calls[rank][n].verb if rank in oldest else usual
        others = {r for r in here if here[r].verb != verb} if n == number else set()
        missing = {*blamed, *unknown} | others
        report.waits.append(Wait(rank, f"{verb} #{n}", missing, group.name))
    return said


def _commonest(values: Iterable[str]) -> str:
    """Return what most ranks give; of two, what the lowest rank gives."""
    return Counter(values).most_common(1)[0][0]


def _unlike(group: Group, here: dict[int, Entry], number: int, call: str) -> list[Finding]:
    """Find ranks that call another verb, give other data, or split an all-to-all otherwise."""
    said: list[Finding] = []
    for what in ("verb", "data"):
        gave = {rank: getattr(entry, what) for rank, entry in here.items()}
        usual = _commonest(gave.values())
        like = [rank for rank in gave if gave[rank] == usual]
        # Data are empty where they may differ, or are not known.
        for rank in [r for r in gave if gave[r] and usual and gave[r] != usual]:
            group.odd.add((rank, number))
            blamed = [like[0], rank] if what == "verb" else [rank]
            text = f"rank {rank} gave {gave[rank]} to {call}, {names(like)} gave {usual}."
            if what == "verb":
                text = f"rank {rank} called {gave[rank]} where {names(like)} called {call}."
            said.append(Finding("sure", blamed, text))
        if said:
            return said
    for a, b in permutations([rank for rank in here if here[rank].splits], 2):
        (sent, _), (_, taken) = here[a].splits, here[b].splits
        i, j = group.ranks.index(a), group.ranks.index(b)
        if len(sent) == len(taken) == len(group.ranks) and sent[j] != taken[i]:
            text = f"rank {a} sends {sent[j]} items to rank {b} in {call}, which expects {taken[i]}"
            said.append(Finding("sure", [a, b], f"{text}."))
    return said


# ---------------------------------------------------------------------- messages
_TO = {"send": "to", "recv": "from", "exchange": "with"}


def _explain_messages(groups: dict[tuple[int, str], Group], report: Report) -> list[Finding]:
    """For each open message, look for an open other end at the other rank."""
    open_ends: dict[tuple, list[Entry]] = defaultdict(list)  # by rank, its peer, and the group
    exchanged: dict[tuple, int] = {}  # number of the latest exchange that has ended
    ended: Counter[tuple] = Counter()  # other messages, by rank, its peer, the group, and the verb
    said: list[Finding] = []
    for rank, recording in report.recordings.items():
        for e in [e for e in recording.entries if e.peer is not None]:
            group = groups[rank, e.group]
            peer = group.ranks[e.peer] if e.peer < len(group.ranks) else rank
            if e.done and e.verb == "exchange":
                exchanged[rank, group.name] = e.number
            elif e.done:
                ended[rank, peer, group.name, e.verb] += 1
            elif peer == rank:
                call = f"{e.verb} #{e.number}"
                report.waits.append(Wait(rank, call, set(), group.name, is_message=True))
                text = f"rank {rank} waits in {call} on {group.name}; with which rank is unknown."
                said.append(Finding("stuck", [rank], text))
            else:
                open_ends[rank, peer, group.name].append(e)
    for (rank, peer, group), e in [(key, e) for key, mine in open_ends.items() for e in mine]:
        others = open_ends.get((peer, rank, group), ())
        has_come = any(e.verb == "exchange" or other.verb != e.verb for other in others)
        call = f"{e.verb} #{e.number} {_TO[e.verb]} rank {peer}"
        if e.verb == "exchange":
            has_ended = exchanged.get((peer, group), 0) >= e.number
        else:  # a small message leaves before it is received: the nth there is the nth here
            other = "recv" if e.verb == "send" else "send"
            nth = [m for m in open_ends[rank, peer, group] if m.verb == e.verb].index(e)
            nth += ended[rank, peer, group, e.verb] - ended[peer, rank, group, other]
            is_known = all(report.recordings[r].has_all_messages for r in (rank, peer))
            has_ended = is_known and nth < 0
            ends = [m.data for m in others if m.verb == other]
            if e.verb == "send" and is_known and 0 <= nth < len(ends) and ends[nth] != e.data:
                text = (
                    f"rank {rank} sends {e.data} in {call} on {group}, which expects {ends[nth]}."
                )
                said.append(Finding("sure", [rank, peer], text))
        missing = set() if has_come or has_ended else {peer}
        report.waits.append(Wait(rank, call, missing, group, is_message=True))
        waits = f"rank {rank} waits in {call} on {group}"
        if not missing:
            said.append(Finding("stuck", [rank], f"{waits}, and rank {peer} has called it."))
        elif report.knows(peer):
            text = f"{waits}; the other end is not open on rank {peer}."
            said.append(Finding("accused", [peer], text))
        else:
            said.append(Finding("unknown", [peer], f"{waits}; nothing is known of rank {peer}."))
    return said


def _circle(waits: dict[int, set[int]]) -> list[int]:
    """Return a circle of ranks that wait, the first again at the end; empty if there is none."""
    for start in sorted(waits):
        way = [start]
        while others := waits.get(way[-1]):
            if (after := min(others)) in way:
                return [*way[way.index(after) :], after]
            way.append(after)
    return []
