"""`minipar overlap`: a timeline taken apart by hand; and files that strangers hand over."""

import gzip
import math

import pytest

from minipar.cli import looking
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.tools.overlap import breakdown
from minipar.tools.traces import from_profiler
from tests.tools.test_kineto import NCCL, _host, _kernel, gpu_trace, read, write


def launched(name, at, ts, dur, correlation, cat="kernel", **args):
    """A kernel, and the call on the host that launched it at `at`."""
    launch = _host("cudaLaunchKernel", at, 1, 1, cat="cuda_runtime", correlation=correlation)
    return [launch, _kernel(name, ts, dur, correlation, **args) | {"cat": cat}]


def steps_trace(rank, host="a", skew=0.0, late=0.0):
    """Two steps of 1000 us: a gemm, and an all-gather that it hides by half."""
    said = {"Collective name": "_allgather_base", "Process Group Description": "mesh_dp"}
    said |= {"Group size": 2, "In msg nelems": 100, "dtype": "Half", "Process Group Ranks": "[0,1]"}
    events = []
    # NCCL's copy engine, and a kernel that no table names: the call says what they are.
    copied = {"cat": "gpu_memcpy", "bytes": 100}
    for i, (name, more) in enumerate([("Memcpy DtoD (x)", copied), ("vendor_x<1>", {})]):
        t, number = 1000.0 * i, 10 * i
        events += [
            _host(f"ProfilerStep#{i + 3}", t, 990, 1, cat="user_annotation"),
            _host("/my/pytorch/train.py(12): step", t + 1, 900, 1, cat="python_function"),
            _host("torch/nn/modules/module.py(9): f", t + 2, 90, 1, cat="python_function"),
            _host("typing_extensions.py(9): wrapper", t + 3, 90, 1, cat="python_function"),
            _host("record_param_comms", t + 40, 50, 1, **said, Seq=i),
            *launched("gemm", t + 10, t + 100, 200, number + 1),
            *launched(name, t + 50, t + 200 + late, 200 - late, number + 2, **more),
            _host("aten::copy_", t + 55, 9, 1),
            *launched("at::native::copy<1>", t + 60, t + 410, 10, number + 3),
        ]
    peers = {"fromDevice": 0, "toDevice": 1, "bytes": 77}
    events += launched("Memcpy DtoD (Device -> Device)", 1500, 1600, 50, 90, "gpu_memcpy", **peers)
    peers |= {"toDevice": 0}
    events += launched("Memcpy DtoD (Device -> Device)", 1510, 1700, 50, 91, "gpu_memcpy", **peers)
    events = [e | {"ts": e["ts"] + skew} for e in events]
    return {"distributedInfo": {"rank": rank}, "host_name": host, "traceEvents": events}


@pytest.fixture
def two_hosts(tmp_path):
    """Rank 1 on another host, its clock 3 s ahead, and 30 us late for each all-gather."""
    write(tmp_path / "r0.json", steps_trace(0))
    write(tmp_path / "r1.json.gz", steps_trace(1, "b", 3e6, 30.0))
    return tmp_path


def test_steps_call_sites_and_who_is_waited_for(two_hosts):
    """By hand. Catches annotated kernels as computing, seq 0 taken for none, clocks compared."""
    t = from_profiler(two_hosts)
    assert any("2 hosts: the time of each" in note for note in t.notes)
    parts = breakdown(t)
    median, first, second = parts.parts["step"]
    assert (median.name, first.name, second.name) == ("median", "ProfilerStep#3", "ProfilerStep#4")
    assert first.seconds == pytest.approx(1e-3)
    # 200..400 of rank 0, 230..400 of rank 1, beside a gemm until 300 us
    assert first.total == pytest.approx(185e-6) and first.exposed == pytest.approx(100e-6)
    assert second.exposed == pytest.approx(150e-6)  # with the copy to the other GPU
    names = {kind: {row.name for row in rows} for kind, rows in parts.parts.items()}
    assert names["collective"] == {"all_gather", "peer_copy"}
    assert names["call site"] == {"/my/pytorch/train.py(12): step"}
    (dp,) = (row for row in parts.parts["group"] if row.name == "dp")
    assert dp.calls == 2
    (waited,) = parts.waited
    assert (waited.rank, waited.calls, waited.of) == (1, 2, 2)
    assert waited.seconds == pytest.approx(60e-6)


def test_nobody_is_waited_for_where_all_come_together(tmp_path):
    """Mutants: somebody is named all the same; files of two days are compared without a word."""
    write(tmp_path / "r0.json", steps_trace(0))
    write(tmp_path / "r1.json", steps_trace(1))
    assert "no rank is waited for" in str(breakdown(t := from_profiler(tmp_path))) and not t.notes
    write(tmp_path / "r1.json", steps_trace(1, skew=1e9))
    assert "files of a share no moment: are they of one run?" in from_profiler(tmp_path).notes


def test_a_step_is_as_long_as_the_profiler_was_told(tmp_path):
    """Of 990 us, with kernels from the 100th to the 410th. Mutant: idle ends are left out."""
    trace = steps_trace(0)
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["ts"] < 1000]
    write(tmp_path / "r0.json", trace)
    for t in (found := from_profiler(tmp_path)), found.shifted():
        ((_, start, end),) = t.steps[0]
        assert end - start == pytest.approx(990e-6)


def test_a_call_belongs_to_the_step_that_launched_it(tmp_path):
    """The host runs ahead: both calls are launched in step 3, and one runs in the time of step 4.

    Mutant: calls are counted where they run.
    """
    events = [_host(f"ProfilerStep#{i}", 100 * (i - 3), 90, 1, "user_annotation") for i in (3, 4)]
    events += launched("gemm", 10, 100, 100, 1) + launched("gemm", 110, 300, 100, 2)
    events += launched(NCCL, 20, 200, 50, 3) + launched(NCCL, 30, 320, 60, 4)
    parts = breakdown(read(tmp_path, *events))
    _, third, fourth = parts.parts["step"]
    assert (third.calls, fourth.calls) == (2, 0)
    assert third.total == pytest.approx(110e-6) and third.exposed == pytest.approx(50e-6)
    assert " -" in str(parts).splitlines()[1]  # bytes are not known


@pytest.mark.parametrize("first, common", [(3, [3, 4]), (4, [4]), (9, [])])
def test_steps_that_not_all_ranks_recorded_are_left_out(tmp_path, first, common):
    """Steps 3 and 4, and three from `first` on, on another host, 20 us late; no Seq. A gemm of
    each hides 50 us of the next one's call. Mutants: the nth calls of both are one; a step of one
    rank takes half as long; a batch of messages counts.
    """
    batch = WORLD | {"Collective name": "coalesced"}
    for rank, begin in enumerate((3, first)):
        events = []
        for i in range(begin, begin + 2 + rank):
            at, late = 1000 * i + 3e6 * rank, 20 * rank
            events += [_host(f"ProfilerStep#{i}", at, 990, 1, "user_annotation")]
            events += launched(NCCL, at + 9, at + 100 + late, 200 - late, 3 * i, **WORLD)
            events += launched("ncclDevKernel_SendRecv", at + 9, at + 600, 9, 3 * i + 1, **batch)
            events += launched("gemm", at + 20, at + 1150, 50, 3 * i + 2)
        write(tmp_path / f"r{rank}.json", gpu_trace(rank, f"n{rank}") | {"traceEvents": events})
    parts = breakdown(t := from_profiler(tmp_path))
    told = {row.name: row.calls for row in parts.parts["step"] if row.name != "median"}
    assert told == {f"ProfilerStep#{i}": 2 for i in common}
    exposed = 9 + (150 + (180 if first == 4 else 130)) / 2  # in step 4, of 200 and 180 us
    assert not common or parts.parts["step"][-1].exposed == pytest.approx(1e-6 * exposed)
    assert [(w.calls, w.of) for w in parts.waited] == [(len(common),) * 2] * bool(common)
    assert any("not all ranks recorded" in note for note in t.notes)


def test_time_in_which_several_collectives_wait_counts_once(tmp_path):
    """Three wait at once for rank 1, 500 us late; two are coalesced, of one number.
    Mutants: 1,500 us are told; of one number only the last call counts."""
    for rank in range(2):
        at, dur = 500 * rank, 600 - 500 * rank
        events = [_kernel(NCCL, at, dur, i, Seq=i // 2, **WORLD) for i in range(3)]
        write(tmp_path / f"r{rank}.json", gpu_trace(rank) | {"traceEvents": events})
    (waited,) = breakdown(from_profiler(tmp_path)).waited
    assert (waited.rank, waited.calls) == (1, 3) and waited.seconds == pytest.approx(500e-6)


def test_steps_are_those_of_the_host(tmp_path):
    """Mutants: the profiler's copies of them for the GPU count, or a launch that is called so."""
    document = steps_trace(0)
    plain = from_profiler(write(tmp_path / "a.json", document)).steps
    document["traceEvents"] += [
        _host("ProfilerStep#3", 100, 650, 7, cat="gpu_user_annotation"),
        _host("ProfilerStep#4", 1100, 650, 7, cat="gpu_user_annotation"),
        _host("ProfilerStep#4", 5, 5, 1, cat="cuda_runtime", correlation=98),
        _host("Optimizer.step#A", 5, 5, 1, cat="cuda_runtime", correlation=99),
    ]
    assert from_profiler(write(tmp_path / "a.json", document)).steps == plain


def test_who_is_waited_for_is_not_told_of_groups_that_are_not_known(tmp_path):
    """Mutant: collectives of any group are those of all ranks, and one of them is late."""
    for rank in range(2):
        document = steps_trace(rank, late=30.0 * rank)
        for event in document["traceEvents"]:
            event["args"].pop("Process Group Description", None)
            event["args"].pop("Process Group Ranks", None)
        write(tmp_path / f"r{rank}.json", document)
    parts = breakdown(from_profiler(tmp_path))
    assert parts.waited == [] and "all_gather" in str(parts)


def test_names_of_strangers_are_letters_and_no_formulas(tmp_path, capsys):
    """Catches escapes for terminals, and `$` that matplotlib takes for a formula."""
    document = steps_trace(0)
    for event in document["traceEvents"]:
        event["name"] = event["name"].replace("train.py", "train\x1b[2J").replace("gemm", r"a$\x$b")
        if "Process Group Description" in event["args"]:
            event["args"]["Process Group Description"] = "\x1b[2J\ud800$\\frac{$_{"
    path = write(tmp_path / "a.json", document)
    looking.overlap(looking.Overlap([str(path)], str(tmp_path / "a.png")))
    said = capsys.readouterr().out
    assert "\x1b" not in said and "?[2J?$" in said
    assert said.endswith("a.png: ProfilerStep#4\n")  # of two, the one after a warm-up


def refusal(path) -> str:
    """What `minipar overlap` refuses this file with; empty if it shows it, with numbers only."""
    try:
        t = looking.read_timeline([str(path)])
    except ValueError as error:
        assert path.name in str(error), error
        return str(error)
    assert t.spans and all(math.isfinite(s.start) and s.start <= s.end for s in t)
    return ""


AT = b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": %s}]}'
NO_TRACES = [  # the content of a file, and what is said of it
    (b"", "not a readable trace"),
    (b"[" * 200_000, "not a readable trace"),
    (b"null", "no list `traceEvents`"),
    (b'{"traceEvents": [], "distributedInfo": null}', "no operator and no kernel"),
    (b'{"traceEvents": [1]}', "is not what torch.profiler writes"),
    (AT % b"NaN", "an event of it begins at nan us and takes 0.0 us"),
    (AT % (b"1" + b"0" * 400), "is not what torch.profiler writes"),
    (b'{"minipar": 1, "traceEvents": [{"ph": "X"}]}', "was not written by Timeline.save"),
    (b'{"minipar": 2, "spans": [], "traceEvents": [], "label": ""}', "a timeline without spans"),
    (gzip.compress(b"{}")[:-6], "not a readable trace"),
]


def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path):
    for content, why in NO_TRACES:
        (tmp_path / "x.json").write_bytes(content)
        assert why in refusal(tmp_path / "x.json"), content[:50]
    (tmp_path / "empty").mkdir()
    assert "no .json or .json.gz in" in refusal(tmp_path / "empty")
    assert "not a readable trace: [Errno 2]" in refusal(tmp_path / "gone.json")


def test_the_folder_of_a_run_has_its_timeline(tmp_path, capsys):
    """Mutant: its config.json and others are taken for traces."""
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert "has no timeline.json yet" in refusal(tmp_path)
    Timeline([Span("comm", "send", 0, 0.0, 1.0, "pp")]).save(tmp_path / "timeline.json")
    assert not refusal(tmp_path)


WORLD = {"Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]"}


def test_calls_are_not_matched_by_order_where_one_rank_recorded_more(tmp_path):
    """Without Seq; rank 0 saw one call more. Mutant: each of its calls waits for the one before."""
    for rank in range(2):
        events = [_kernel(NCCL, 1000 * i, 200 - 9 * rank, i, **WORLD) for i in range(rank, 6)]
        write(tmp_path / f"r{rank}.json", gpu_trace(rank) | {"traceEvents": events})
    assert breakdown(from_profiler(tmp_path)).waited == []


def test_nobody_is_waited_for_where_a_root_leaves_early(tmp_path):
    """Mutant: the root of a broadcast came last, as its part is the shortest."""
    for rank in range(2):
        bcast = _kernel("ncclDevKernel_Broadcast", 0, 20 + 400 * rank, 1, Seq=1, **WORLD)
        write(tmp_path / f"r{rank}.json", gpu_trace(rank) | {"traceEvents": [bcast]})
    parts = breakdown(from_profiler(tmp_path))
    assert parts.waited == [] and "who is waited for is not known" in str(parts)


ON_NCCL = {"backend": "nccl", "rank": 0}
ON_MTIA = {"backend": "mtia:hccl,cpu:gloo", "rank": 0}
ON_BOTH = {"backend": "cpu:gloo,cuda:nccl", "rank": 0}


@pytest.mark.parametrize(
    "info, calls, is_refused",
    [
        (ON_NCCL, ["c10d::allreduce_", "nccl:all_reduce"], True),
        (ON_NCCL, [], True),
        (ON_MTIA, ["c10d::barrier", "gloo:barrier", "hccl:all_to_all"], True),
        (ON_BOTH, ["c10d::barrier", "gloo:barrier", "c10d::allreduce_"], True),
        (ON_BOTH, ["c10d::barrier", "gloo:barrier"], False),
    ],
)
def test_a_job_on_gpus_is_not_read_from_its_host_alone(tmp_path, info, calls, is_refused):
    """Mutant: how long the host takes to launch is told as communication."""
    events = [_host("aten::mm", 10, 20, 9)]
    events += [_host(name, 40 + 50 * i, 40, 9 + i) for i, name in enumerate(calls)]
    path = write(tmp_path / "r0.json", {"traceEvents": events, "distributedInfo": info})
    assert ("lacks the GPU of its job" in refusal(path)) == is_refused


def test_what_a_job_on_gpus_sends_by_gloo_is_communication(tmp_path):
    """60 us beside a kernel of 40. Mutant: it sends nothing, as its GPU sends nothing."""
    calls = [_host("c10d::allreduce_", 20, 5, 1), _host("gloo:all_reduce", 22, 60, 5)]
    t = read(tmp_path, *launched("gemm", 10, 12, 50, 1), *calls)
    (row,) = t.overlap()
    assert row.total == pytest.approx(60e-6) and row.hidden == pytest.approx(40e-6)


@pytest.mark.parametrize("others, axis", [([2, 3], "gloo"), ([0, 1], "world")])
def test_calls_of_groups_that_are_not_known_wait_for_nobody(tmp_path, others, axis):
    """gloo does not say in which of several groups it works, but where all have the same ranks."""
    groups = [{"pg_desc": "default_pg", "ranks": [0, 1]}, {"pg_desc": "other", "ranks": others}]
    for rank in range(2):
        events = [_host("aten::mm", 0, 9, 1), _host("gloo:all_reduce", 20, 60 + 9 * rank, 5)]
        document = gpu_trace(rank, f"n{rank}") | {"traceEvents": events}
        document["distributedInfo"] = {"backend": "gloo", "rank": rank, "pg_config": groups}
        write(tmp_path / f"r{rank}.json", document)
    t = from_profiler(tmp_path)
    assert {row.axis for row in t.overlap()} == {axis}
    assert bool(breakdown(t).waited) == (axis == "world")
