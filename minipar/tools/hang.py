"""Why does this job hang? What PyTorch's flight recorder, or our watchdog, wrote down, explained.

Idea:   every rank notes the collectives that it calls, by group and number. Those of one number
        belong together: a rank without it did not come; one with another verb, size or type of data
        left the others' order. Waits are followed to a rank that does not wait, or around a circle.
Files:  one per rank, the rank being the last number in the name (``nccl_trace_rank_3``): pickles or
        JSON of the recorder (``TORCH_FR_BUFFER_SIZE=2000``, ``TORCH_NCCL_DUMP_ON_TIMEOUT=1``); or
        the ``stalled.json`` of `minipar train`, of all ranks. Folders in a folder name hosts.
Safety: a pickle could call any function. Here none is called: containers, text, numbers alone.
Limits: gloo records neither messages between two ranks nor who is in a group: taken are the ranks
        that ever called there. A call older than the recorder's buffer counts as come. Of a rank
        without a recording nothing is known: it may wait as the others do.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp. In torch: ``torchfrtrace``.
Proved by tests/tools/test_hang.py, on dumps of jobs that hang.
"""

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from minipar.observe.stalls import State, names
from minipar.text import printable

LARGEST_DUMP = 256 << 20
"""Bytes: what is larger is refused. A buffer of 20,000 calls with their stacks takes 10 MB."""

MOST_RANKS = 10**5

# Verbs that may be given other sizes on other ranks; and files whose lines are not the job's own.
_UNEVEN = re.compile(r"all_?to_?all|scatter$|gather$|gather_v|barrier|coalesced")
_FOREIGN = re.compile(r"(site|dist)-packages/|/torch/|/(threading|runpy|contextlib)\.py:|^<")
# What ends a group of coalesced calls. In small letters, as in allreduce_coalesced, it is a call.
_END_OF_GROUP = re.compile(r"([A-Z_]+_)?coalesced")


@dataclass(frozen=True)
class Entry:
    """One call of one rank. `number` counts within the group; messages count apart."""

    verb: str
    group: str
    number: int
    done: bool
    data: str = ""  # what it is given: "4 Float"; empty if that may differ or is not known
    peer: int | None = None  # of a message: the other rank, as a number within the group
    stack: tuple[str, ...] = ()  # innermost call first


@dataclass
class Recording:
    """What one rank wrote down. `groups`: name -> description, ranks (empty: not recorded)."""

    rank: int
    host: str
    entries: list[Entry]
    groups: dict[str, tuple[str, tuple[int, ...]]]
    stack: tuple[str, ...] = ()  # where it is now, if that is known
    said: str = ""  # of a rank that does not answer
    is_known: bool = True  # whether anything can be said of its calls


@dataclass
class Group:
    """The collectives of all ranks on one process group: ``calls[rank][number]``."""

    name: str
    ranks: tuple[int, ...]
    calls: dict[int, dict[int, Entry]] = field(default_factory=lambda: defaultdict(dict))
    odd: set[tuple[int, int]] = field(default_factory=set)  # (rank, number) unlike the others'


@dataclass
class Wait:
    """`ranks` wait in `call` for those `missing`."""

    ranks: list[int]
    call: str
    missing: list[int]
    is_message: bool = False


@dataclass
class Report:
    """What the dumps tell; `str` of it is a page. Without `findings`, nothing hangs."""

    recordings: dict[int, Recording]
    groups: list[Group]
    findings: list[str]
    waits: list[Wait]
    culprits: list[int]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        calls = sum(len(r.entries) for r in self.recordings.values())
        lines = [f"{calls:,} calls of {names(sorted(self.recordings))}"]
        lines += self.findings or ["no hang: every recorded call has ended"]
        lines += ["\nwho waits for whom:"] if self.waits else []
        for w in self.waits:
            known = [rank for rank in w.missing if self.knows(rank)]
            unknown = [rank for rank in w.missing if not self.knows(rank)]
            what = [names(known)] * bool(known) + [f"perhaps {names(unknown)}"] * bool(unknown)
            lines.append(f"  {names(w.ranks)} in {w.call} -> {' and '.join(what) or 'its end'}")
        lines += [f"note: {note}" for note in self.notes]
        lines += [self._whereabouts(rank) for rank in self.culprits[:8]]
        return "\n".join(lines)

    def knows(self, rank: int) -> bool:
        """Whether anything can be said of the calls of that rank."""
        return rank in self.recordings and self.recordings[rank].is_known

    def _whereabouts(self, rank: int) -> str:
        if (recording := self.recordings.get(rank)) is None:
            return f"\nrank {rank}: no dump. Has it ended, is it stopped, or its file elsewhere?"
        last = recording.entries[-1] if recording.entries else None
        said = "it has called nothing" if recording.is_known else "nothing is heard of it"
        if last is not None:
            group = recording.groups[last.group][0] or last.group
            said = f"{'its last was' if last.done else 'it waits in'} {last.verb} #{last.number}"
            said += f" on {group}"
        stack = recording.stack or (last.stack if last else ())
        own = [line for line in stack if not _FOREIGN.search(line)] or list(stack)
        where = f" on {recording.host}" if recording.host else ""
        here = (", called here:" if not recording.stack else "; it is here:") if own else ""
        head = f"\nrank {rank}{where}: {said}{recording.said and '; ' + recording.said}{here}"
        return "\n    ".join([head, *own[:8]])


# ---------------------------------------------------------------------- reading
def read(paths: Sequence[str | Path]) -> tuple[dict[int, Recording], list[str]]:
    """Recordings by rank, and notes, from files and folders.

    Raises `ValueError`, which names the file, for what is no dump, for two of one rank, and where
    no call was recorded. In a folder, what cannot be read is skipped if there is another dump.
    """
    files: list[tuple[Path, str]] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"no such dump: {path}")
        if path.is_dir():
            files += [(file, "") for file in sorted(path.iterdir())]
            files += [(file, file.parent.name) for file in sorted(path.glob("*/*"))]
        else:
            files.append((path, ""))
    found: dict[int, tuple[Recording, Path]] = {}
    skipped: list[str] = []
    broken: list[OSError | ValueError] = []
    for file, host in files:
        if file.is_dir():
            continue
        is_named = file in map(Path, paths)
        try:
            recordings = _recordings(file, printable(host))
        except _NoDump as error:
            if is_named:
                raise ValueError(f"{file} is no dump: {error}") from None
            skipped.append(printable(file.name))
            continue
        except (OSError, ValueError) as error:
            if is_named:
                raise
            broken.append(error)
            continue
        for recording in recordings:
            if not 0 <= recording.rank < MOST_RANKS:
                raise ValueError(f"{file}: a rank of {recording.rank:.3g} is none")
            first = found.setdefault(recording.rank, (recording, file))[1]
            if first != file:
                raise ValueError(f"{first} and {file} are both of rank {recording.rank}; give one")
    where = " ".join(map(str, paths))
    if not found:
        if broken:
            raise broken[0]
        raise ValueError(f"no dump of a flight recorder or of our watchdog in {where}")
    if not any(recording.entries for recording, _ in found.values()):
        raise ValueError(
            f"no call of {names(sorted(found))} was recorded in {where}: TORCH_FR_BUFFER_SIZE must "
            f"be above 0 when the job starts, such as 2000"
        )
    notes = [f"skipped, as no dumps: {', '.join(skipped[:5])}"] if skipped else []
    notes += [f"skipped: {printable(error)}" for error in broken[:5]]
    return {rank: found[rank][0] for rank in sorted(found)}, notes


class _NoDump(ValueError):
    """A file of some other kind, which a folder may hold."""


class _Plain(pickle._Unpickler):
    """Containers, text and numbers. In Python: the one in C takes the memory a pickle asks for."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; only plain data is read")

    def get_extension(self, code: int) -> Any:
        raise pickle.UnpicklingError("it asks for a class; only plain data is read")


_ODD = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
"""What is raised where a dump holds something else than is expected there."""


def _recordings(file: Path, host: str) -> list[Recording]:
    if not file.is_file():  # a pipe or a device might never end
        raise _NoDump("it is no file")
    with open(file, "rb") as opened:
        raw = opened.read(1)
        if raw not in (b"\x80", b"{"):
            raise _NoDump("it is neither a pickle nor an object of JSON")
        if file.stat().st_size > LARGEST_DUMP:
            raise ValueError(f"{file} holds over {LARGEST_DUMP >> 20} MiB; record fewer calls")
        raw += opened.read()
    try:
        dump = _Plain(io.BytesIO(raw)).load() if raw[:1] == b"\x80" else json.loads(raw)
    except Exception as error:  # a broken pickle raises anything
        raise ValueError(
            f"{file} is no readable dump: {printable(error) or type(error).__name__}"
        ) from None
    try:
        if isinstance(dump, dict) and isinstance(dump.get("minipar_stall"), list):
            return [_of_watchdog(state) for state in dump["minipar_stall"]]
        if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
            raise _NoDump("it has no list `entries`")
        return [_of_recorder(dump, file, host)]
    except _NoDump:
        raise
    except _ODD as error:
        why = printable(f"{error!r:.150}")
        raise ValueError(f"{file} is not what a flight recorder writes: {why}") from None


def _of_recorder(dump: dict[str, Any], file: Path, host: str) -> Recording:
    numbers = re.findall(r"\d{1,9}", file.name)
    rank = dump["rank"] if type(dump.get("rank")) is int else int(numbers[-1]) if numbers else -1
    if rank < 0:
        raise ValueError("of which rank is it? Its name is to end with the number")
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, about in dict(dump.get("pg_config") or {}).items():
        ranks = sorted({int(r) for r in re.findall(r"\d{1,9}", str(about.get("ranks", "")))})
        if name != "":  # as gloo calls whichever group was made last
            groups[printable(name)] = printable(about.get("desc", "")), tuple(ranks)
    entries: list[Entry] = []
    inside: dict[tuple, list[int]] = defaultdict(list)  # group and numbers -> where in `entries`
    for values in dump["entries"]:
        name, desc, *_ = (*map(printable, values.get("process_group") or ()), "", "")
        name = name or printable(values.get("pg_id", ""))
        groups.setdefault(name, (desc, ()))
        entry = _entry(values, name)
        at_once = name, *map(values.get, ("seq_id", "collective_seq_id", "p2p_seq_id"))
        if _END_OF_GROUP.fullmatch(entry.verb) and at_once in inside:
            # Torch updates the state of this entry alone: it is that of the calls in the group.
            for i in inside[at_once]:
                entries[i] = replace(entries[i], done=entries[i].done or entry.done)
            continue
        inside[at_once].append(len(entries))
        entries.append(entry)
    return Recording(rank, printable(dump.get("host_name") or host), entries, groups)


def _entry(values: dict[str, Any], group: str) -> Entry:
    verb = printable(values["profiling_name"]).rpartition(":")[2]
    message = re.match(r"(send|recv)\s+\d{1,9}\s*(?:->|<-)\s*(\d{1,9})", verb)
    number = values.get("p2p_seq_id") if message else None
    number = number or values.get("collective_seq_id", values.get("seq_id"))
    verb = message[1] if message else verb
    types = "/".join(sorted({printable(d) for d in values.get("input_dtypes") or ()}))
    items = sum(prod(map(int, size)) for size in values.get("input_sizes") or ())
    done = values.get("retired") is True or values.get("state") == "completed"
    return Entry(
        verb,
        group,
        int(number),
        done or bool(values.get("time_discovered_completed_ns")),
        "" if _UNEVEN.search(verb) or not types else f"{items} {types}",
        int(message[2]) if message else None,
        tuple(
            f"{printable(f['filename'])}:{int(f['line'])} in {printable(f['name'])}"
            for f in values.get("frames") or ()
        ),
    )


def _of_watchdog(values: Any) -> Recording:
    state = State.from_json(json.dumps(values))
    waits = {(call.key, call.verb): call for call in state.awaited}
    calls = {(call.key, call.verb): call for call in state.begun} | waits
    entries, groups = [], {}
    # The latest call stands last, behind it what the rank waits in.
    for key, call in sorted(calls.items(), key=lambda c: (c[0] in waits, -c[1].seconds)):
        name = f"{printable(call.axis)} {call.ranks}"
        groups[name] = printable(call.axis), tuple(map(int, call.ranks))
        waiting, verb = key in waits, printable(call.verb)
        ends = [call.ranks.index(peer) for peer in call.peers] or [None]
        ends = ends if waiting else ends[:1]  # what has ended is one call
        entries += [Entry(verb, name, int(call.number), not waiting, peer=end) for end in ends]
    stack = tuple(printable(line).strip() for line in reversed(state.stack.splitlines()))
    host = printable(state.label).partition(" on host ")[2]
    said = "" if state.stack else printable(state.silence)
    known = bool(state.is_known)
    return Recording(int(state.rank), host, entries, groups, stack, said, known)


# ---------------------------------------------------------------------- explaining
def explain(recordings: dict[int, Recording], notes: Sequence[str] = ()) -> Report:
    """Say who waits for whom, and why."""
    groups = _grouped(recordings)
    report = Report(recordings, list(groups.values()), [], [], [], notes)
    for group in groups.values():
        _explain_group(group, report)
    _explain_messages(groups, report)
    waits: dict[int, set[int]] = defaultdict(set)
    for wait in report.waits:
        for rank in wait.ranks:
            waits[rank] |= set(wait.missing) - {rank}
    blamed = {rank for missing in waits.values() for rank in missing}
    report.culprits += sorted(blamed - waits.keys() - set(report.culprits))
    circle = [] if report.culprits else _circle(waits)
    report.culprits = report.culprits or sorted(circle[1:]) or sorted(waits)
    if circle:
        links = ", which waits for ".join(f"rank {rank}" for rank in circle)
        report.findings.insert(0, f"They wait in a circle: {links}.")
    report.waits.sort(key=lambda wait: wait.ranks)
    return report


def _grouped(recordings: dict[int, Recording]) -> dict[str, Group]:
    told: dict[str, tuple[str, set[int]]] = {}
    for rank, recording in recordings.items():
        for name, (desc, ranks) in recording.groups.items():
            told.setdefault(name, (desc, set()))[1].update(ranks)
        for entry in recording.entries:
            told[entry.group][1].add(rank)
    everyone = set(range(max(recordings) + 1)).union(*(ranks for _, ranks in told.values()))
    groups = {}
    for name, (desc, ranks) in told.items():
        ranks = everyone if desc == "default_pg" or name == "0" else ranks
        title = f"group {name}" if desc in ("", "undefined") else desc
        if [other for other, _ in told.values()].count(desc) > 1:
            title += f" of {names(sorted(ranks))}"
        groups[name] = Group(title, tuple(sorted(ranks)))
    for rank, recording in recordings.items():
        for entry in recording.entries:
            if entry.peer is None:
                groups[entry.group].calls[rank].setdefault(entry.number, entry)
    return groups


def _explain_group(group: Group, report: Report) -> None:
    """Append what is wrong at the first number of the group at which ranks wait.

    What comes later follows from this: NCCL's calls queue up behind one that is stuck.
    """
    waiting = {n for calls in group.calls.values() for n, e in calls.items() if not e.done}
    if not waiting:
        return
    number = min(waiting)
    here = {r: calls[number] for r, calls in group.calls.items() if number in calls}
    absent = [r for r in group.ranks if max(group.calls.get(r, ()), default=0) < number]
    missing = [r for r in absent if report.knows(r)]
    unknown = [r for r in absent if not report.knows(r)]
    verb, like = _most({r: e.verb for r, e in here.items()})
    call = f"{verb} #{number} on {group.name}"
    others = {r: e for r, e in here.items() if r not in like}
    for r, other in others.items():
        group.odd.add((r, number))
        again = [n for n, e in group.calls[like[0]].items() if e.verb == other.verb]
        order = next((n for n in sorted(again) if n > number), None)
        report.findings.append(
            f"rank {r} called {other.verb} where {names(like)} called {call}"
            + (f"; theirs comes at #{order}: another order." if order else ".")
        )
    data, same = _most({r: here[r].data for r in like})
    for r in like:
        if r not in same and here[r].data:
            group.odd.add((r, number))
            report.findings.append(
                f"rank {r} gave {here[r].data} to {call}, {names(same)} gave {data}."
            )
    stuck = [r for r in sorted(here) if not here[r].done]
    if missing:
        report.findings.append(f"{names(missing)} did not come to {call}.")
    if unknown:
        report.findings.append(f"Whether {names(unknown)} came to {call} is unknown.")
    if not absent and not others and same == like:
        alone = " Who else is in that group, the dumps do not say." * (len(group.ranks) == 1)
        report.findings.append(f"All have called {call}, and it does not end.{alone}")
    for verb in dict.fromkeys(here[r].verb for r in stuck):
        mine = [r for r in stuck if here[r].verb == verb]
        against = [r for r in here if here[r].verb != verb]
        name = f"{verb} #{number} on {group.name}"
        report.waits.append(Wait(mine, name, sorted({*absent, *against})))
    if others:  # they wait for each other: one of each kind
        report.culprits += [r for r in (*others, like[0]) if r not in report.culprits]


def _most(values: dict[int, str]) -> tuple[str, list[int]]:
    """The commonest of what ranks say (of two, the lowest rank's), and which ranks say so."""
    said = list(values.values())
    word = max(sorted(values), key=lambda rank: (said.count(values[rank]), -rank))
    return values[word], [rank for rank in sorted(values) if values[rank] == values[word]]


# What a message may meet at its other end, the likeliest first.
_ENDS = {
    "send": ("recv", "exchange"),
    "exchange": ("exchange", "send", "recv"),
    "recv": ("send", "exchange"),
}
_ORDER = [*_ENDS]  # of two ends that are open, the first of these tells


def _kind(entry: Entry) -> str:
    """A key of `_ENDS`: a send may have a name of its own."""
    return next((kind for kind in ("recv", "exchange") if entry.verb.startswith(kind)), "send")


def _explain_messages(groups: dict[str, Group], report: Report) -> None:
    """Of each message that waits: does the other rank wait in its other end?"""
    waiting, exchanged = [], {}  # exchanged: number of the latest exchange that has ended
    for rank, recording in report.recordings.items():
        for e in recording.entries:
            if e.peer is not None and not e.done and e.peer < len(groups[e.group].ranks):
                waiting.append((rank, groups[e.group].ranks[e.peer], e))
            elif e.peer is not None and e.done and _kind(e) == "exchange":
                exchanged[rank, e.group] = e.number
    sides = {(rank, peer, e.group, _kind(e)): e for rank, peer, e in waiting}
    others, lacking = [], set()  # the other end of each; calls of which an end is not there
    for rank, peer, e in waiting:
        ends = (sides.get((peer, rank, e.group, kind)) for kind in _ENDS[_kind(e)])
        others.append(next(filter(None, ends), None))
        is_over = _kind(e) == "exchange" and exchanged.get((peer, e.group), 0) >= e.number
        if others[-1] is None and not is_over:
            lacking.add((rank, peer, e.group, e.number))
    blocked = {(rank, *call) for rank, _, *call in lacking}
    for (rank, peer, e), other in zip(waiting, others, strict=True):
        kind, end = _kind(e), _ENDS[_kind(e)][0]
        is_missing = (rank, peer, e.group, e.number) in lacking
        preposition = {"send": "to", "recv": "from", "exchange": "with"}[kind]
        call = f"{e.verb} #{e.number} {preposition} rank {peer} on {groups[e.group].name}"
        report.waits.append(Wait([rank], call, [peer] if is_missing else [], is_message=True))
        if is_missing:
            has = f"rank {peer} has no {end} for it open"
            if not report.knows(peer):
                a = "an" if end == "exchange" else "a"
                has = f"whether rank {peer} has {a} {end} for it open is unknown"
            report.findings.append(f"rank {rank} waits in {call}; {has}.")
        elif (rank, e.group, e.number) in blocked:
            continue  # another message of that exchange is to blame
        elif other is None:
            report.findings.append(f"rank {rank} waits in {call}; that of rank {peer} has ended.")
        elif (peer, e.group, other.number) in blocked:
            continue
        elif (_ORDER.index(kind), rank) < (_ORDER.index(_kind(other)), peer):
            differs = f": {e.data} meets {other.data}" if e.data != other.data else ""
            report.findings.append(f"Both ends of {call} of rank {rank} are open{differs}.")


def _circle(waits: dict[int, set[int]]) -> list[int]:
    """Ranks of which each waits for the next, the first again at the end; empty if none."""
    done: set[int] = set()
    for start in sorted(waits):
        way, at = [], start
        while at not in done and at not in way and waits.get(at):
            way.append(at)
            at = min(waits[at], key=lambda rank: (rank not in waits, rank))
        if at in way:
            return [*way[way.index(at) :], at]
        done |= set(way)
    return []
