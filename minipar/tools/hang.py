"""Why does this job hang? Explain what PyTorch's flight recorder, or our watchdog, wrote down.

Idea:   every rank notes its collectives by group and number. Look at the oldest open call of each
        group. A rank that has not called it *did not come*. A rank that is still in it while
        another rank has completed it is *behind*: its device is stuck. The rest are victims, and
        so is a rank that did not come because it waits for another rank elsewhere.
Files:  one per rank, the rank in its name (``nccl_trace_rank_3``): pickles or JSON of the recorder
        (``TORCH_FR_BUFFER_SIZE=2000``, ``TORCH_NCCL_DUMP_ON_TIMEOUT=1``; on gloo, each rank writes
        ``torch._C._distributed_c10d._dump_fr_trace()`` itself); or the ``stalled.json`` of
        `minipar train`, of all ranks. Folders in a folder name hosts.
Safety: a pickle could call any function. Here it calls none: only plain data is read.
Limits: gloo records neither messages nor members: members are the ranks that ever called there.
        The recorder is a ring: without ``pg_status``, a call that fell out of it is unknown.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp. In torch: ``torchfrtrace``.
Proved by tests/tools/test_hang.py, on dumps of jobs that hang.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations, zip_longest
from typing import NamedTuple

from minipar.observe.watchdog import names
from minipar.tools.dumps import Entry, Recording

MOST_LINES = 8  # of each part of the page

_ROOTED = re.compile(r"_?(broadcast|reduce|gather|scatter)(_oop)?")
"""Verbs that end earlier on some ranks than on others."""
_FOREIGN = re.compile(r"(site|dist)-packages/|/torch/|/(threading|runpy|contextlib)\.py:|^<")


@dataclass(eq=False)
class Group:
    """The collectives of one process group: ``calls[rank][number]``, several where coalesced."""

    name: str
    key: str  # in the recordings
    ranks: tuple[int, ...]
    calls: dict[int, dict[int, list[Entry]]] = field(default_factory=dict)
    odd: set[tuple[int, int]] = field(default_factory=set)  # (rank, number) unlike the others'

    def open_calls(self, rank: int) -> list[int]:
        """Return the numbers of the calls of `rank` that have not ended."""
        calls = self.calls.get(rank, {}).items()
        return [n for n, entries in calls if not all(e.done for e in entries)]

    def place(self, rank: int, number: int, recording: Recording | None) -> str:
        """Return where `rank` is at call `number`: "in", "past", "absent" or "unknown"."""
        if recording is None or not recording.is_known:
            return "unknown"
        calls, waiting = self.calls.get(rank, {}), self.open_calls(rank)
        enqueued, completed = recording.last.get(self.key, (-1, -1))
        if number in waiting:
            return "in"
        if number in calls or completed >= number or any(n > number for n in {*calls} - {*waiting}):
            return "past"
        if max([enqueued, *calls]) < number:
            # An empty ring that has turned proves nothing: the call may have fallen out of it.
            is_sure = calls or enqueued >= 0 or not recording.has_turned
            return "absent" if is_sure else "unknown"
        if enqueued >= 0:
            return "in"  # enqueued and not completed
        return "unknown" if recording.has_turned else "past"


class Wait(NamedTuple):
    """`ranks` wait in `call` for those `missing`."""

    ranks: list[int]
    call: str
    missing: list[int]
    group: str
    is_message: bool = False


class _Finding(NamedTuple):
    """A sentence that accuses ranks."""

    text: str
    ranks: list[int]
    # "sure" whatever else they wait in; "accused" unless they wait elsewhere; "unknown"; "stuck"
    # if all have called, which tells something only where nobody is to blame.
    kind: str = "accused"


@dataclass
class Report:
    """The diagnosis of the dumps; its `str` is a page. Without `findings`, nothing hangs."""

    recordings: dict[int, Recording]
    groups: list[Group]
    findings: list[str] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    blamed: list[int] = field(default_factory=list)  # the ranks that are to blame
    culprits: list[int] = field(default_factory=list)  # and others worth a look
    notes: Sequence[str] = ()

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
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def knows(self, rank: int) -> bool:
        """Return True if anything can be said of the calls of that rank."""
        return rank in self.recordings and self.recordings[rank].is_known

    def _victims(self) -> list[str]:
        """Return a line for each call that ranks wait in, and one for all messages of a group."""
        together: dict[tuple, list[Wait]] = defaultdict(list)
        for wait in self.waits:
            together[wait.group, "" if wait.is_message else wait.call].append(wait)
        lines = []
        for (group, call), waits in together.items():
            missing = sorted({rank for wait in waits for rank in wait.missing})
            sure = [rank for rank in missing if self.knows(rank)]
            unsure = [rank for rank in missing if not self.knows(rank)]
            whom = [names(sure)] * bool(sure) + [f"perhaps {names(unsure)}"] * bool(unsure)
            who = names(sorted({rank for wait in waits for rank in wait.ranks}))
            call = call or (waits[0].call if len(waits) == 1 else f"{len(waits)} messages")
            lines.append(f"  {who} in {call} on {group} -> {' and '.join(whom) or 'its end'}")
        return lines

    def _whereabouts(self, rank: int) -> str:
        recording = self.recordings[rank]
        waiting = [entry for entry in recording.entries if not entry.done]
        last = next(iter(waiting or recording.entries[-1:]), None)
        if last is not None:
            said = (
                f"{'its last was' if last.done else 'it waits in'} {last.verb} #{last.number} on "
            )
            said += recording.groups[last.group][0] or last.group
        elif recording.last:  # a status, and no entry
            key = max(recording.last, key=lambda key: recording.last[key])
            said = f"it has ended all its calls, {recording.last[key][1]:,} of them on "
            said += recording.groups[key][0] or key
        else:
            said = "it has called nothing" if recording.is_known else "nothing is heard of it"
        stack = recording.stack or (last.stack if last else ())
        own = [line for line in stack if not _FOREIGN.search(line)] or list(stack)
        where = f" on {recording.host}" if recording.host else ""
        here = (", called here:" if not recording.stack else "; it is here:") if own else ""
        head = f"\nrank {rank}{where}: {said}{recording.said and '; ' + recording.said}{here}"
        return "\n    ".join([head, *own[:8]])


def _most(lines: list[str], most: int = MOST_LINES) -> list[str]:
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return lines[:most] + more


# ---------------------------------------------------------------------- explaining
def explain(recordings: dict[int, Recording], notes: Sequence[str] = ()) -> Report:
    """Say who is to blame for a hang, and who waits for whom."""
    groups = _grouped(recordings)
    report = Report(recordings, list(dict.fromkeys(groups.values())), notes=notes)
    said = [finding for group in report.groups for finding in _explain_group(group, report)]
    said += _explain_messages(groups, report)
    waits: dict[int, set[int]] = defaultdict(set)
    for wait in report.waits:
        for rank in wait.ranks:
            waits[rank] |= {*wait.missing} - {rank}

    def ranks(kind: str) -> set[int]:
        return {rank for finding in said if finding.kind == kind for rank in finding.ranks}

    blamed = ranks("sure") | (ranks("accused") - waits.keys())
    silent = ranks("unknown") - blamed
    circle = [] if blamed or silent else _circle(waits)
    blamed |= {*circle}
    stuck = set() if blamed else ranks("stuck")
    report.blamed = sorted(blamed)
    report.culprits = [*sorted(blamed | stuck), *sorted(silent)]
    if circle:
        links = ", which waits for ".join(f"rank {rank}" for rank in circle)
        report.findings.append(f"They wait in a circle: {links}.")
    told = {"sure": blamed, "accused": blamed, "stuck": stuck, "unknown": silent}
    for kind, those in told.items():
        report.findings += [f.text for f in said if f.kind == kind and {*f.ranks} & those]
    report.findings = report.findings or [f.text for f in said]  # some call is open: a hang
    report.waits.sort(key=lambda wait: wait.ranks)
    return report


def _grouped(recordings: dict[int, Recording]) -> dict[tuple[int, str], Group]:
    """Return the group that each rank means by each name.

    A call that splits a group gives all parts one name, so name *and* members make a group.
    Members that are not recorded come from another rank's group, else from the ranks that called.
    """
    recorded = {
        (name, ranks): None for r in recordings.values() for name, (_, ranks) in r.groups.items()
    }
    everyone = tuple(sorted({*range(max(recordings) + 1)}.union(*(ranks for _, ranks in recorded))))
    groups: dict[tuple, Group] = {}
    found: dict[tuple[int, str], Group] = {}
    for rank, recording in recordings.items():
        for name, (desc, ranks) in recording.groups.items():
            ranks = ranks or next((r for n, r in recorded if n == name and rank in r), ())
            is_world = not ranks and (desc == "default_pg" or name == "0")
            title = f"group {name}" if desc in ("", "undefined") else desc
            group = Group(title, name, everyone if is_world else ranks)
            found[rank, name] = group = groups.setdefault((name, ranks), group)
        for entry in recording.entries:
            group = found[rank, entry.group]
            group.ranks = tuple(sorted({*group.ranks, rank}))
            if entry.peer is None:
                mine = group.calls.setdefault(rank, {})
                mine.setdefault(entry.number, []).append(entry)
    titles = [group.name for group in groups.values()]
    for group in groups.values():
        group.name += f" of {names(group.ranks)}" * (titles.count(group.name) > 1)
    return found


def _explain_group(group: Group, report: Report) -> list[_Finding]:
    """Find who is to blame at the oldest open call of the group. What comes later follows."""
    waiting = [n for rank in group.ranks for n in group.open_calls(rank)]
    if not waiting:
        return []
    number = min(waiting)
    places = {r: group.place(r, number, report.recordings.get(r)) for r in group.ranks}
    inside, past, absent, unknown = (
        [r for r in group.ranks if places[r] == place]
        for place in ("in", "past", "absent", "unknown")
    )
    here = {r: calls[number] for r, calls in sorted(group.calls.items()) if number in calls}
    usual = here[next(iter(_commonest(here, "verb")[1]))][0].verb
    call = f"{usual} #{number} on {group.name}"
    said = _unlike(group, here, number, call)
    begun = [r for r in inside if any(e.begun for e in here.get(r, ()))]
    # A call that is no longer in the ring counts as begun: nothing says otherwise.
    blamed = absent or [r for r in inside if begun and r in here and r not in begun]
    if absent:
        said.append(_Finding(f"{names(absent)} did not come to {call}.", absent))
    elif past and not said:
        blamed, kind = inside, "accused" if _ROOTED.fullmatch(usual) else "sure"
        text = f"behind: {names(inside)}, still in {call}, which {names(past)} ended."
        said.append(_Finding(text, inside, kind))
    elif blamed and not said:
        text = f"behind: {names(blamed)}, where {call} has not begun, as it has on {names(begun)}."
        said.append(_Finding(text, blamed))
    if unknown:
        text = f"Whether {names(unknown)} came to {call} is unknown."
        said.append(_Finding(text, unknown, "unknown"))
    if not said:
        alone = " Who else is in that group, the dumps do not say." * (len(group.ranks) == 1)
        text = f"All have called {call}, and it does not end.{alone}"
        said.append(_Finding(text, inside, "stuck"))
    verbs = {r: here[r][0].verb if r in here else usual for r in {*inside, *here}}
    for verb in dict.fromkeys(verbs[r] for r in inside):
        mine = [r for r in inside if verbs[r] == verb and r not in blamed]
        missing = sorted({*blamed, *unknown, *(r for r in here if verbs[r] != verb)})
        if mine:
            report.waits.append(Wait(mine, f"{verb} #{number}", missing, group.name))
    if ahead := [r for r in past if group.open_calls(r)]:
        later = min(n for r in ahead for n in group.open_calls(r))
        text = f"calls from #{later} on"
        report.waits.append(Wait(ahead, text, sorted({*blamed, *unknown}), group.name))
    return said


def _commonest(here: dict[int, list[Entry]], what: str) -> tuple[list[str], list[int]]:
    """Return what most ranks give as `what` (of two, the lowest rank's), and these ranks."""
    values = {rank: [getattr(e, what) for e in calls] for rank, calls in here.items()}
    said = list(values.values())
    first = max(sorted(values), key=lambda rank: (said.count(values[rank]), -rank))
    return values[first], [rank for rank in sorted(values) if values[rank] == values[first]]


def _unlike(group: Group, here: dict[int, list[Entry]], number: int, call: str) -> list[_Finding]:
    """Find ranks that call another verb, give other data, or split an all-to-all otherwise."""
    said = []
    for what in ("verb", "data"):
        usual, like = _commonest(here, what)
        for rank in [r for r in here if r not in like]:
            pairs = zip_longest((getattr(e, what) for e in here[rank]), usual, fillvalue="nothing")
            i, (own, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            if not own or not theirs:
                continue  # data that may differ, or is not known
            group.odd.add((rank, number))
            of = f" as call {i + 1} of {len(usual)} in one" if len(usual) > 1 else ""
            if what == "verb":
                named = call.replace(usual[0], theirs, 1)
                text = f"rank {rank} called {own} where {names(like)} called {named}{of}"
                later = sorted(n for n, e in group.calls[like[0]].items() if e[0].verb == own)
                order = next((n for n in later if n > number), None)
                text += f"; theirs comes at #{order}: another order." if order else "."
                said.append(_Finding(text, [like[0], rank], "sure"))
            else:
                text = f"rank {rank} gave {own} to {call}{of}, {names(like)} gave {theirs}."
                said.append(_Finding(text, [rank], "sure"))
        if said:
            return said
    splits = {r: here[r][0].splits for r in here if here[r][0].splits}
    for a, b in permutations(sorted(splits), 2):
        sent, taken = splits[a][0], splits[b][1]
        i, j = group.ranks.index(a), group.ranks.index(b)
        if len(sent) == len(taken) == len(group.ranks) and sent[j] != taken[i]:
            text = (
                f"rank {a} sends {sent[j]} items to rank {b} in {call}, which expects {taken[i]}."
            )
            said.append(_Finding(text, [a, b], "sure"))
    return said


# ---------------------------------------------------------------------- messages
_ENDS = {  # a preposition, and the verbs that a message may meet at its other end
    "send": ("to", "recv", "exchange"),
    "exchange": ("with", "exchange", "send", "recv"),
    "recv": ("from", "send", "exchange"),
}


def _kind(entry: Entry) -> str:
    """Return a key of `_ENDS`: a send may have a name of its own."""
    return next((kind for kind in ("recv", "exchange") if entry.verb.startswith(kind)), "send")


def _explain_messages(groups: dict[tuple[int, str], Group], report: Report) -> list[_Finding]:
    """For each open message, look for an open other end at the other rank."""
    open_ends: dict[tuple, list[Entry]] = defaultdict(list)  # by rank, its peer, and the group
    exchanged: dict[tuple, int] = {}  # number of the latest exchange that has ended
    for rank, recording in report.recordings.items():
        for e in recording.entries:
            group = groups[rank, e.group]
            if e.peer is not None and e.peer < len(group.ranks):
                key = rank, group.ranks[e.peer], group.name
                if not e.done:
                    open_ends[key].append(e)
                elif _kind(e) == "exchange":
                    exchanged[rank, group.name] = e.number
    said = []
    for (rank, peer, group), mine in open_ends.items():
        for e in mine:
            (preposition, *ends), others = _ENDS[_kind(e)], open_ends.get((peer, rank, group), ())
            other = next((o for o in others if _kind(o) in ends), None)
            is_over = _kind(e) == "exchange" and exchanged.get((peer, group), 0) >= e.number
            call = f"{e.verb} #{e.number} {preposition} rank {peer}"
            missing = [] if other or is_over else [peer]
            report.waits.append(Wait([rank], call, missing, group, is_message=True))
            call += f" on {group}"
            if missing:
                is_known = report.knows(peer)
                has = f"rank {peer} has no {ends[0]} for it open"
                has = has if is_known else f"whether {has.replace('no', 'a', 1)} is unknown"
                kind = "accused" if is_known else "unknown"
                said.append(_Finding(f"rank {rank} waits in {call}; {has}.", [peer], kind))
            elif other is None:
                text = f"rank {rank} waits in {call}; the call of rank {peer} has ended."
                said.append(_Finding(text, [rank], "stuck"))
            elif rank < peer:
                differs = f": {e.data} meets {other.data}" if e.data != other.data else ""
                text = f"Both ends of {call} of rank {rank} are open{differs}."
                kind = "sure" if differs else "stuck"
                said.append(_Finding(text, [rank, peer], kind))
    return said


def _circle(waits: dict[int, set[int]]) -> list[int]:
    """Return a circle of ranks that wait, the first again at the end; empty if there is none."""
    after = {
        rank: min(others, key=lambda other: (other not in waits, other))
        for rank, others in waits.items()
        if others
    }
    for start in sorted(after):
        way, at = [start], after[start]
        while at in after and at not in way:
            way.append(at)
            at = after[at]
        if at in way:
            return [*way[way.index(at) :], at]
    return []
