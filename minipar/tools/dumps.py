"""Read what ranks wrote down when their job hung: dumps of PyTorch's flight recorder.

One file per rank, its name ending with the rank (``nccl_trace_rank_3``), pickle or JSON. NCCL
writes it where ``TORCH_FR_BUFFER_SIZE=2000`` and ``TORCH_NCCL_DUMP_ON_TIMEOUT=1`` are set; on gloo,
each rank writes ``torch._C._distributed_c10d._dump_fr_trace()`` itself. A pickle could call any
function. Here it calls none: only containers, text and numbers are read.
"""

import io
import json
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from minipar.observe.hang import Entry, Recording
from minipar.text import names, printable

_UNEVEN = re.compile(r"all_?to_?all|scatter$|gather$|gather_v|barrier|coalesced")
"""Verbs with sizes that may differ between ranks."""
_END_OF_GROUP = re.compile(r"([A-Z_]+_)?coalesced")
"""Names that end a group of coalesced calls. allreduce_coalesced, in small letters, is a call."""


class _Plain(pickle.Unpickler):
    """Containers, text and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; only plain data is read")


def read(paths: Sequence[str | Path]) -> dict[int, Recording]:
    """Return the recordings of files, and of all dumps in folders, by rank.

    Raises `ValueError`, which names the file: for a file that is no dump, for two files of one
    rank, and for a file of an older job, whose calls all timed out before the other files begin.
    Raises it also where no call was recorded.
    """
    found: dict[int, tuple[Path, Recording, tuple[float, float]]] = {}
    for path in map(Path, paths):
        for file in sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]:
            recording, when = _recording(file)
            first, *_ = found.setdefault(recording.rank, (file, recording, when))
            if first != file:
                raise ValueError(f"{first} and {file} are both of rank {recording.rank}")
    where = " ".join(map(str, paths))
    if not found:
        raise ValueError(f"no dump of a flight recorder in {where}")
    latest = max(begin for _, _, (begin, _) in found.values())
    for file, _, (_, end) in found.values():
        if end < latest:
            raise ValueError(f"{file} is of an older job than others: take it away")
    by_rank = {rank: found[rank][1] for rank in sorted(found)}
    # A rank whose calls have all ended has no entry in a dump of open calls, but it has a status.
    if not any(recording.entries or recording.last for recording in by_rank.values()):
        how = "TORCH_FR_BUFFER_SIZE must be above 0 when the job starts, such as 2000"
        raise ValueError(f"no call of {names([*by_rank])} was recorded in {where}: {how}")
    # What one rank tells of a group holds for the status of all its ranks.
    mixed = {(g, r.groups[g]) for r in by_rank.values() for g, last in r.last.items() if not last}
    for r in by_rank.values():
        r.last = {g: last for g, last in r.last.items() if (g, r.groups[g]) not in mixed}
    return by_rank


def _recording(file: Path) -> tuple[Recording, tuple[float, float]]:
    """Return what a file says; and when its first call began, and its last one is to time out."""
    try:
        raw = file.read_bytes()
        dump = json.loads(raw) if raw[:1] == b"{" else _Plain(io.BytesIO(raw)).load()
        return _of_recorder(dump, _rank_of(file.name))
    except Exception as error:  # a broken pickle raises anything
        why = printable(f"{error!r:.150}")
        raise ValueError(f"{file} is not a dump of a flight recorder: {why}") from None


def _rank_of(name: str) -> int:
    """Return the number at the end of the name of a file, unless it may be a date."""
    if not (number := re.search(r"(?:^|[A-Za-z_])(\d{1,5})(\.[a-z]+)?$", name)):
        raise ValueError("which rank wrote it? Let its name end with the number, as in rank_3")
    return int(number[1])


def _of_recorder(dump: dict[str, Any], rank: int) -> tuple[Recording, tuple[float, float]]:
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, about in dump.get("pg_config", {}).items():
        ranks = sorted({int(r) for r in re.findall(r"\d{1,9}", str(about.get("ranks", "")))})
        if name != "":  # gloo's name for the group that was made last
            groups[printable(name)] = printable(about.get("desc", "")), tuple(ranks)
    # torch leaves an empty list out of JSON.
    listed = dump.get("entries", []) if "version" in dump else dump["entries"]
    # A group that was destroyed and made again has another id, and counts from 1 again.
    latest = {values["process_group"][0]: values.get("pg_id") for values in listed}
    together: dict[tuple, list[Entry]] = defaultdict(list)  # by group and numbers
    for values in (v for v in listed if v.get("pg_id") == latest[v["process_group"][0]]):
        name, desc = map(printable, values["process_group"])
        groups.setdefault(name, (desc, ()))
        at_once = name, values["collective_seq_id"], values.get("p2p_seq_id")
        together[at_once].append(_entry(values, name))
    entries = [entry for calls in together.values() for entry in _joined(calls)]
    status = dump.get("pg_status", {})
    last = _status(status, {printable(i): printable(name) for name, i in latest.items()}, groups)
    # NCCL counts messages as well in the status of a group that has any: it is marked with None.
    mixed = {name for name, _, messages in together if messages}
    mixed |= {name for name, (enqueued, completed) in last.items() if completed > enqueued}
    last |= dict.fromkeys(mixed)
    # A dump of open calls alone is empty where all have ended.
    latest_call = max((int(s["last_enqueued_collective"]) for s in status.values()), default=0)
    has_turned = listed[0].get("record_id", 0) > 0 if listed else latest_call > 0
    timed = [v for v in listed if {"time_created_ns", "timeout_ms"} <= v.keys()]
    begin = min((v["time_created_ns"] for v in timed), default=0)
    end = max((v["time_created_ns"] + 1e6 * v["timeout_ms"] for v in timed), default=math.inf)
    for name, (desc, ranks) in groups.items():
        groups[name] = f"group {name}" if desc in ("", "undefined") else desc, ranks
    return Recording(rank, entries, groups, last, has_turned), (begin, end)


def _status(status: dict, ids: dict[str, str], groups: dict) -> dict[str, tuple[int, int]]:
    """Return the last enqueued and completed call of each group whose `pg_id` is known.

    Where no entry has the id, names and ids count groups in the order of their creation.
    """
    if len(groups) == len(status) and all(name.isdecimal() for name in (*groups, *status)):
        ids = dict(zip(sorted(status, key=int), sorted(groups, key=int), strict=True)) | ids
    counts = "last_enqueued_collective", "last_completed_collective"
    return {ids[i]: tuple(int(s[count]) for count in counts) for i, s in status.items() if i in ids}


def _entry(values: dict[str, Any], group: str) -> Entry:
    backend, _, verb = printable(values["profiling_name"]).rpartition(":")
    message = re.match(r"(send|recv)\s+\d{1,9}\s*(?:->|<-)\s*(\d{1,9})", verb)
    verb = message[1] if message else verb
    types = "/".join(sorted({printable(d) for d in values.get("input_dtypes") or ()}))
    items = sum(prod(map(int, size)) for size in values.get("input_sizes") or ())
    done = values.get("state") == "completed"
    if backend == "gloo":  # gloo has no other sign; NCCL also retires a call that timed out
        done = done or values.get("retired") is True
    splits = values.get("input_split_sizes"), values.get("output_split_sizes")
    return Entry(
        verb,
        group,
        int(values["p2p_seq_id" if message else "collective_seq_id"]),
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


def _joined(calls: list[Entry]) -> list[Entry]:
    """Return messages of one number as they are; join its other calls into one entry.

    The joined entry is, for example, "2 x _broadcast_oop", of "16 Float + 25 Float".
    """
    if len(calls) > 1 and _END_OF_GROUP.fullmatch(calls[-1].verb):
        # Torch updates the state of the last entry alone: this state holds for the whole group.
        *calls, end = calls
        calls = [replace(c, done=c.done or end.done, begun=c.begun or end.begun) for c in calls]
    if calls[0].peer is not None:
        return calls
    runs = [(verb, len([*run])) for verb, run in groupby(call.verb for call in calls)]
    one = replace(
        calls[0],
        verb=" + ".join(f"{count} x {verb}" if count > 1 else verb for verb, count in runs),
        data=" + ".join(call.data for call in calls) if all(c.data for c in calls) else "",
        done=all(call.done for call in calls),
        begun=any(call.begun for call in calls),
    )
    return [one]
