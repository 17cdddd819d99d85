"""Read what ranks wrote down when their job hung: dumps of a flight recorder, or of our watchdog.

A pickle could call any function. Here it calls none: only containers, text and numbers are read.
The layout stands in torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from minipar.observe.watchdog import State, names
from minipar.text import printable

MOST_RANKS = 10**5

_UNEVEN = re.compile(r"all_?to_?all|scatter$|gather$|gather_v|barrier|coalesced")
"""Verbs with sizes that may differ between ranks."""
_END_OF_GROUP = re.compile(r"([A-Z_]+_)?coalesced")
"""Names that end a group of coalesced calls. allreduce_coalesced, in small letters, is a call."""


@dataclass
class Entry:
    """One call of one rank. `number` counts within the group; messages count apart."""

    verb: str
    group: str
    number: int
    done: bool
    data: str = ""  # the input: "4 Float"; empty if sizes may differ or are not known
    peer: int | None = None  # of a message: the other rank, as a number within the group
    stack: tuple[str, ...] = ()  # innermost call first
    begun: bool = False  # True if the recorder saw the call begin on the device
    splits: tuple[list[int], list[int]] | None = None  # of an all-to-all: items to and from each


@dataclass
class Recording:
    """The dump of one rank. `groups`: name -> description, ranks (empty: not recorded)."""

    rank: int
    host: str
    entries: list[Entry]
    groups: dict[str, tuple[str, tuple[int, ...]]]
    stack: tuple[str, ...] = ()  # where the rank is now, if that is known
    said: str = ""  # of a rank that does not answer
    is_known: bool = True  # False if nothing can be said of its calls
    last: dict[str, tuple[int, int]] = field(default_factory=dict)  # group: enqueued, completed
    has_turned: bool = False  # True if older calls have fallen out of the ring


class _Plain(pickle.Unpickler):
    """Containers, text and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; only plain data is read")


def read(paths: Sequence[str | Path]) -> tuple[dict[int, Recording], list[str]]:
    """Return recordings by rank, and notes, from files and folders.

    Raises `ValueError`, which names the file, for other files, for two of one rank, and where
    no call was recorded. In a folder, what cannot be read is skipped if there is another dump.
    """
    found: dict[int, tuple[Recording, Path]] = {}
    skipped: list[str] = []
    for file, host, is_named in _files([Path(path) for path in paths]):
        try:
            recordings = _recordings(file, printable(host))
        except (OSError, ValueError) as error:
            if is_named:
                raise
            skipped.append(printable(error))
            continue
        for recording in recordings:
            first = found.setdefault(recording.rank, (recording, file))[1]
            if first != file:
                raise ValueError(f"{first} and {file} are both of rank {recording.rank}; give one")
    where = " ".join(map(str, paths))
    if not found:
        raise ValueError("; ".join(skipped[:1]) or f"no dump of a flight recorder in {where}")
    # A rank whose calls have all ended has no entry in a dump of open calls, but it has a status.
    if not any(recording.entries or recording.last for recording, _ in found.values()):
        raise ValueError(
            f"no call of {names(sorted(found))} was recorded in {where}: TORCH_FR_BUFFER_SIZE must "
            f"be above 0 when the job starts, such as 2000"
        )
    notes = [f"skipped: {error}" for error in skipped[:5]]
    return {rank: found[rank][0] for rank in sorted(found)}, notes


def _files(paths: list[Path]) -> Iterable[tuple[Path, str, bool]]:
    """Yield file, host and whether the user named it."""
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such dump: {path}")
        inside = [*sorted(path.iterdir()), *sorted(path.glob("*/*"))] if path.is_dir() else [path]
        for file in inside:
            if not file.is_dir():
                host = file.parent.name if file.parent not in (path, path.parent) else ""
                yield file, host, file in paths


def _recordings(file: Path, host: str) -> list[Recording]:
    raw = file.read_bytes()
    try:
        dump = json.loads(raw) if raw[:1] == b"{" else _Plain(io.BytesIO(raw)).load()
        if "minipar_stall" in dump:
            found = [_of_watchdog(state) for state in dump["minipar_stall"]]
        else:
            found = [_of_recorder(dump, file, host)]
    except Exception as error:  # a broken pickle raises anything
        why = printable(f"{error!r:.150}")
        raise ValueError(f"{file} is not a dump of a flight recorder: {why}") from None
    if not all(0 <= recording.rank < MOST_RANKS for recording in found):
        raise ValueError(f"{file}: which rank wrote it? Let its name end with the number")
    return found


def _rank_of(name: str) -> int:
    """Return the number behind "rank" in the name of a file, else the last one that is no date."""
    name = re.sub(r"(19|20)\d\d-\d\d-\d\d[T_ \d:.-]*", "", name)
    if told := re.search(r"rank_?(\d+)(?!\d|[\w.-]*_\d)", name):
        return int(told[1])
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else -1


def _of_recorder(dump: dict[str, Any], file: Path, host: str) -> Recording:
    rank = dump["rank"] if type(dump.get("rank")) is int else _rank_of(file.name)
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, about in dict(dump.get("pg_config") or {}).items():
        ranks = sorted({int(r) for r in re.findall(r"\d{1,9}", str(about.get("ranks", "")))})
        if name != "":  # as gloo calls whichever group was made last
            groups[printable(name)] = printable(about.get("desc", "")), tuple(ranks)
    entries: list[Entry] = []
    ids: dict[str, str] = {}  # pg_id -> group
    inside: dict[tuple, list[Entry]] = defaultdict(list)  # by group and numbers
    for values in dump["entries"]:
        name, desc, *_ = (*map(printable, values.get("process_group") or ()), "", "")
        name = name or printable(values.get("pg_id", ""))
        groups.setdefault(name, (desc, ()))
        ids[printable(values.get("pg_id", ""))] = name
        entry = _entry(values, name)
        at_once = name, *map(values.get, ("seq_id", "collective_seq_id", "p2p_seq_id"))
        if _END_OF_GROUP.fullmatch(entry.verb) and at_once in inside:
            # Torch updates the state of this entry alone: it holds for all calls in the group.
            for call in inside[at_once]:
                call.done, call.begun = call.done or entry.done, call.begun or entry.begun
        else:
            inside[at_once].append(entry)
            entries.append(entry)
    first = dump["entries"][0].get("record_id", 0) if dump["entries"] else 0
    last = _status(dict(dump.get("pg_status") or {}), ids, groups)
    host = printable(dump.get("host_name") or host)
    return Recording(rank, host, entries, groups, last=last, has_turned=int(first) > 0)


def _status(status: dict, ids: dict[str, str], groups: dict) -> dict[str, tuple[int, int]]:
    """Return the last enqueued and completed call of each group whose `pg_id` is known.

    Groups without an entry are matched in the order of their creation, where the counts agree.
    """
    numbered = [name for name in groups if name.isdecimal()]
    if not ids.keys() <= status.keys():
        ids = {name: name for name in groups}  # keyed by names
    elif len(numbered) == len(groups) == len(status) and all(i.isdecimal() for i in status):
        ids = dict(zip(sorted(status, key=int), sorted(groups, key=int), strict=True)) | ids
    counts = "last_enqueued_collective", "last_completed_collective"
    return {ids[i]: tuple(int(s[count]) for count in counts) for i, s in status.items() if i in ids}


def _entry(values: dict[str, Any], group: str) -> Entry:
    backend, _, verb = printable(values["profiling_name"]).rpartition(":")
    message = re.match(r"(send|recv)\s+\d{1,9}\s*(?:->|<-)\s*(\d{1,9})", verb)
    number = values.get("p2p_seq_id") if message else None
    number = number or values.get("collective_seq_id", values.get("seq_id"))
    verb = message[1] if message else verb
    types = "/".join(sorted({printable(d) for d in values.get("input_dtypes") or ()}))
    items = sum(prod(map(int, size)) for size in values.get("input_sizes") or ())
    done = values.get("state") == "completed" or bool(values.get("time_discovered_completed_ns"))
    if backend == "gloo":  # it knows no other sign; NCCL also retires a call that timed out
        done = done or values.get("retired") is True
    splits = values.get("input_split_sizes"), values.get("output_split_sizes")
    return Entry(
        verb,
        group,
        int(number),
        done,
        data="" if _UNEVEN.search(verb) or not types else f"{items} {types}",
        peer=int(message[2]) if message else None,
        stack=tuple(
            f"{printable(f['filename'])}:{int(f['line'])} in {printable(f['name'])}"
            for f in values.get("frames") or ()
        ),
        begun=done or values.get("state") == "started",
        splits=tuple([int(n) for n in s] for s in splits) if all(splits) else None,
    )


def _of_watchdog(values: Any) -> Recording:
    state = State.from_json(json.dumps(values))
    waits = {(call.key, call.verb): call for call in state.awaited}
    calls = {(call.key, call.verb): call for call in state.begun} | waits
    entries, groups = [], {}
    # The latest call stands last, behind it the call in which the rank waits.
    for key, call in sorted(calls.items(), key=lambda c: (c[0] in waits, -c[1].seconds)):
        name = f"{printable(call.axis)} {call.ranks}"
        groups[name] = printable(call.axis), tuple(map(int, call.ranks))
        waiting, verb = key in waits, printable(call.verb)
        ends = [call.ranks.index(peer) for peer in call.peers] or [None]
        ends = ends if waiting else ends[:1]  # calls that have ended are one call
        entries += [Entry(verb, name, int(call.number), not waiting, peer=end) for end in ends]
    stack = tuple(printable(line).strip() for line in reversed(state.stack.splitlines()))
    host = printable(state.label).partition(" on host ")[2]
    said, known = "" if state.stack else printable(state.silence), bool(state.is_known)
    return Recording(int(state.rank), host, entries, groups, stack, said, known)
