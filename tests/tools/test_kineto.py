"""Traces of anybody's training: what the profiler wrote, read as spans; and what a stranger wrote.

Every number here is worked out by hand beside the trace that it follows from.
"""

import gzip
import json
import time

import pytest
import torch
from torch import nn

from minipar.observe import gpu
from minipar.observe.spans import Span
from minipar.observe.timeline import Timeline
from minipar.tools import kernels
from minipar.tools.traces import from_profiler
from tests.comm.same import assert_disjoint


def _profiled(folder):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile

    rank = dist.get_rank()
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    ddp, adamw = DistributedDataParallel(model), torch.optim.AdamW(model.parameters())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            ddp(torch.randn(8, 64)).square().mean().backward()
            adamw.step()
            dist.all_gather_single(torch.empty(128), torch.ones(64))
    name = f"{folder}/job.{rank}.json" + (".gz" if rank else "")
    profiler.export_chrome_trace(name)


@pytest.mark.slow
def test_real_profiles_of_torch_ddp_on_cpus(ranks, tmp_path):
    """torch's DDP under torch.profiler, nothing of ours inside; one trace plain, one gzipped."""
    ranks(2).run(_profiled, str(tmp_path))
    t = from_profiler(tmp_path)
    again = from_profiler([f"{tmp_path}/job.0.json", f"{tmp_path}/job.1.json.gz"])
    assert (t.spans, t.label) == (again.spans, again.label)
    assert t.ranks == [0, 1] and t.start == 0
    for rank in t.ranks:
        mine = t.select(rank=rank)
        assert {s.kind for s in mine} == {"forward", "backward", "optimizer", "comm"}
        assert [s.name for s in mine.select(kind="optimizer")] == ["AdamW"] * 3
        assert len(mine.select(kind="comm", name="all_gather")) == 3
        assert len(mine.select(kind="comm", name="all_reduce")) >= 3
        assert {s.axis for s in mine if s.kind == "comm"} == {"world"}
        assert_disjoint(mine)
        order = [s.kind for s in mine if s.kind != "comm"]
        assert order.index("forward") < order.index("backward") < order.index("optimizer")
    ends = [s.end for r in t.ranks for s in [t.select(rank=r, name="all_gather").spans[-1]]]
    assert abs(ends[0] - ends[1]) < 0.2  # files of one host share a clock


def _kernel(name, ts, dur, correlation, **args):
    """Each kernel is on a stream of its own, unless `args` say another."""
    where = {"device": 0, "stream": correlation, "correlation": correlation}
    return _host(name, ts, dur, 7, "kernel", **{**where, **args}) | {"pid": 0}


def _host(name, ts, dur, tid, cat="cpu_op", **args):
    event = {"ph": "X", "cat": cat, "name": name, "pid": 99, "tid": tid}
    return event | {"ts": ts, "dur": dur, "args": args}


NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def read(tmp_path, *events, name="a.json"):
    return from_profiler(write(tmp_path / name, {"traceEvents": events}))


def gpu_trace(rank, host="node0", skew_us=0.0):
    """As Kineto writes it: host threads launch (correlation), streams run later."""
    group = {"Process Group Name": "3", "Process Group Description": "mesh_dp", "Group size": 4}
    engine = "autograd::engine::evaluate_function: MmBackward0"
    launch = {"cat": "cuda_runtime", "tid": 1}
    events = [
        {"ph": "M", "name": "process_name", "pid": 99, "tid": 0, "args": {"name": "python"}},
        _host("ProfilerStep#3", 0, 500, 1, cat="user_annotation"),
        _host("aten::mm", 10, 20, 1),
        _host("cudaLaunchKernel", 15, 5, correlation=1, **launch),
        _host(engine, 40, 50, 2),
        _host("cudaLaunchKernel", 50, 5, correlation=2, **{**launch, "tid": 2}),
        _host("Optimizer.step#AdamW.step", 100, 50, 1, cat="user_annotation"),
        _host("cuLaunchKernelEx", 110, 5, correlation=3, cat="cuda_driver", tid=1),
        _host("nccl:all_reduce", 60, 5, 2, cat="user_annotation"),
        _kernel("sm90_xmma_gemm_bf16", 100, 100, 1),
        _kernel("sm90_xmma_gemm_bf16", 200, 100, 2),
        _kernel(NCCL, 250, 100, 9, **{"Collective name": "allreduce", "Seq": 41}, **group),
        _kernel("multi_tensor_apply_kernel", 360, 40, 3),
        _kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 380, 10, 10),
        {**_kernel("Memcpy HtoD", 0, 10, 11), "cat": "gpu_memcpy"},
        {**_kernel("nccl:all_reduce", 250, 100, 9), "cat": "gpu_user_annotation"},
    ]
    events = [e | ({"ts": e["ts"] + skew_us} if "ts" in e else {}) for e in events]
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 4},
        "host_name": host,
        "baseTimeNanoseconds": 1_790_857_026_000_000_000,
        "traceEvents": events,
    }


def write(path, document):
    data = json.dumps(document).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_gpu_profiles_by_kernels_and_who_launched_them(tmp_path):
    """By hand from `gpu_trace`. Catches host time taken for GPU time, and annotations counted."""
    t = from_profiler(write(tmp_path / "a.json.gz", gpu_trace(rank=2)))
    assert t.ranks == [2] and len(t) == 6
    kinds = [s.kind for s in t]
    assert kinds == ["copy", "forward", "backward", "comm", "optimizer", "comm"]
    reduce, message = t.select(kind="comm")
    assert (reduce.name, reduce.axis) == ("all_reduce", "dp")
    assert (message.name, message.axis) == ("exchange", "")
    assert reduce.start == pytest.approx(250e-6) and t.duration == pytest.approx(400e-6)
    unknown, dp = t.overlap()
    assert (dp.hidden, dp.exposed) == (pytest.approx(50e-6), pytest.approx(50e-6))
    assert unknown.exposed == pytest.approx(0) and "not recorded" in t.table()


def test_on_a_gpu_kernels_take_the_names_of_what_launched_them(tmp_path):
    """`record` there, with the trace of a GPU in place of the profiler: clock, names and bytes.

    Catches kernels left on the wall clock, named by when they ran, or without the ledger's bytes.
    """

    class Profiler:
        def stop(self):
            pass

        def export_chrome_trace(self, path):
            write(tmp_path / "t.json", document).rename(path)

    now = time.monotonic()
    document = gpu_trace(0) | {"baseTimeNanoseconds": time.time_ns()}  # so the trace begins now
    host = [  # launches lie at 15, 50 and 110 us
        Span("forward", "layers.0", 0, now, now + 3.2e-5),
        Span("backward", "layers.0", 0, now + 3.2e-5, now + 8e-5),
        Span("optimizer", "AdamW", 0, now + 8e-5, now + 2e-4),
        Span("comm", "reduce_scatter", 0, now, now + 1, "dp", 77),
        Span("comm", "send", 0, now + 1e-5, now + 1, "pp", 88),
    ]
    # Reading the two clocks takes time: hold them together as the trace does, to the microsecond.
    with pytest.MonkeyPatch.context() as patch:
        base = document["baseTimeNanoseconds"]
        patch.setattr(time, "time_ns", lambda: base)
        patch.setattr(time, "monotonic_ns", lambda: int(1e9 * now))
        spans = Timeline(gpu.with_kernels(Profiler(), host, 0))
    assert [(s.kind, s.name) for s in spans] == [
        ("copy", "Memcpy HtoD"),
        ("forward", "layers.0"),
        ("backward", "layers.0"),
        ("comm", "reduce_scatter"),
        ("optimizer", "AdamW"),
        ("comm", "send"),
    ]
    assert [(s.axis, s.num_bytes) for s in spans.select(kind="comm")] == [("dp", 77), ("pp", 88)]
    assert spans.select(kind="backward").start - now == pytest.approx(200e-6, abs=1e-6)
    # All have been launched within a block, and two communicators run them the other way round:
    # they stay communication and copies, and the ledger has the order of launches.
    plain = document["traceEvents"]
    document["traceEvents"] = plain + [
        _host("cudaLaunchKernel", at, 1, correlation=number, cat="cuda_runtime", tid=1)
        for number, at in ((10, 20), (9, 28), (11, 18))
    ]
    spans = Timeline(gpu.with_kernels(Profiler(), host, 0))
    assert [(s.axis, s.num_bytes) for s in spans.select(kind="comm")] == [("pp", 88), ("dp", 77)]
    assert [s.name for s in spans.select(kind="copy")] == ["Memcpy HtoD"]
    document["traceEvents"] = plain
    # Ranks that share a GPU talk over gloo: no kernel of NCCL, and the ledger stands.
    document["traceEvents"] = [e for e in document["traceEvents"] if "nccl" not in e["name"]]
    spans = Timeline(gpu.with_kernels(Profiler(), host, 0))
    assert [(s.name, s.num_bytes, s.start) for s in spans.select(kind="comm")] == [
        ("reduce_scatter", 77, now),
        ("send", 88, now + 1e-5),
    ]


def test_on_cpus_a_blocking_call_inside_of_an_operator_is_no_computing(tmp_path):
    """A hook that all-reduces within backward: 20..80 us of 0..100 are spent waiting."""
    engine = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        _host(engine, 0, 100, 1),
        _host("c10d::allreduce_", 20, 60, 1),
        _host("gloo:all_reduce", 21, 58, 5, cat="user_annotation"),
    ]
    t = read(tmp_path, *events)
    assert [s.kind for s in t] == ["backward", "comm", "backward"]
    assert [round(1e6 * s.duration) for s in t] == [20, 58, 20]
    assert t.hidden_fraction == 0


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank1.json", "rank3.json"], [1, 3]),
        (["node7_Rank_10.pt.trace.json", "node7_rank_2.pt.trace.json"], [10, 2]),
        (["job-master-0_77.16.pt.trace.json", "job-worker-0_78.17.pt.trace.json"], [0, 1]),
        (["node7_42.168.pt.trace.json", "node7_42.169.pt.trace.json"], "both of rank 0; give one"),
    ],
)
def test_ranks_by_file_name_where_the_trace_is_silent(tmp_path, names, ranks):
    """Mutant: torch's own names, HOST_PID.TIME, are two ranks, though of two cycles of one."""
    silent = {**gpu_trace(0), "distributedInfo": {}}
    files = [write(tmp_path / name, silent) for name in names]
    if isinstance(ranks, str):
        with pytest.raises(ValueError, match=f"{names[0]} and .*{names[1]} are {ranks}"):
            from_profiler(files)
    else:
        t = from_profiler(files)
        assert t.ranks == sorted(ranks)
        assert ("no file tells its rank" in str(t.notes)) == (ranks == [0, 1])
        assert from_profiler(files[:1]).ranks == ranks[:1]


def test_a_stream_runs_one_kernel_after_the_other(tmp_path):
    """By hand: "b" says 2,000 us, and the next of its stream begins after 200. By less than 20 us
    kernels do overlap. Mutants: nothing is cut; rounding is told; of any stream, the next one cuts.
    """
    events = [_kernel("a", 0, 110, 1), _kernel("b", 100, 2000, 2), _kernel("c", 300, 100, 3)]
    events = [event | {"args": event["args"] | {"stream": 7}} for event in events]
    events += [_kernel(NCCL, 150, 50, 20), _kernel(NCCL, 450, 100, 20, stream=20)]
    t = read(tmp_path, *events)
    (row,) = t.overlap()
    assert row.total == pytest.approx(150e-6) and row.exposed == pytest.approx(100e-6)
    assert [round(1e6 * s.duration) for s in t.select(kind="compute")] == [110, 200, 100]
    assert t.notes[0].endswith("are cut there: 1, by up to 1,800 us")


def test_traces_of_torch_before_1_13_have_nothing_to_read(tmp_path):
    """Their categories are Kernel and Operator."""
    host = _host("aten::mm", -50, 20, 5) | {"cat": "Operator"}
    with pytest.raises(ValueError, match=r"a\.json is a trace, but holds no operator"):
        read(tmp_path, _kernel("gemm", 0, 100, 1) | {"cat": "Kernel"}, host)


def test_a_file_of_several_processes_is_refused(tmp_path):
    """Mutant: what one rank computes hides what another one sends."""
    events = [_host("aten::mm", 0, 100, 1) | {"pid": pid} for pid in (7, 8)]
    with pytest.raises(ValueError, match="2 processes are in it; give one file per rank"):
        read(tmp_path, *events)


def test_devices_of_one_trace_are_ranks(tmp_path):
    """Mutant: what one GPU computes hides what the other sends."""
    events = [_kernel("gemm", 0, 100, 1), _kernel(NCCL, 100, 100, 2), _kernel("gemm", 200, 9, 3)]
    events += [_kernel("gemm", 100, 200, 4, device=1)]
    events += [_kernel("copied", 0, 5, 5, device=2) | {"cat": "gpu_memcpy"}]
    t = read(tmp_path, *events, name="rank3.json")
    (row,) = t.overlap()
    assert t.ranks == [3, 4] and row.rank == 3 and row.exposed == pytest.approx(1e-4)
    assert t.notes[0].startswith("rank 4 is a further device of ")


# ---------------------------------------------------------------------- names of kernels
COMMUNICATING = {  # as the libraries' own kernels are spelled in traces -> the verb
    NCCL: "all_reduce",
    "mscclKernel_Sum_hip_bfloat16_Simple_false": "mscclKernel_Sum_hip_bfloat16_Simple_false",
    "allgather(mscclpp::SmChannelDeviceHandle*, mscclpp::DeviceSyncer*)": "all_gather",
    "hcom_allReduce__503_0_1": "all_reduce",
    "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)": "all_to_all",
    "dispatch(hybrid_ep::dispatch_kernel_param_t<unsigned char>)": "all_to_all",
    "void a2a_kernels::a2a_combine_recv_kernel<16>(unsigned long)": "all_to_all",
    "moeA2ADispatchKernel": "all_to_all",
    "one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**)": "all_reduce",
    "allToAllV(void*, void*, long*)": "all_to_all",
    "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)": "barrier",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)": "all_reduce",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<float, 8>": "all_reduce",
    "void userbuffers_fp16_sum_inplace_gpu_rw_ag<2>(int)": (
        "void userbuffers_fp16_sum_inplace_gpu_rw_ag<2>(int)"
    ),
    "Memcpy PtoP (Device -> Device)": "peer_copy",
}
COMPUTING = [
    "sm90_xmma_gemm_bf16",
    "void flash_fwd_splitkv_combine_kernel<128>",
    "void deep_ep::ep::combine_reduce_epilogue_impl<true, 24>(void*)",
    "void uccl::layout::get_dispatch_layout<256, 32, 8>(int const*)",
    "void at::native::index_elementwise_kernel<gather>",
    "occlusion_kernel",
]


@pytest.mark.parametrize("name", COMMUNICATING)
def test_communication_is_known_by_its_names(tmp_path, name):
    """A rank that only talks hides nothing. Catches kernels of other libraries as computing."""
    events = [_kernel(name, 0, 100, 1), _kernel("gemm", 50, 100, 2), _kernel(NCCL, 0, 80, 3)]
    if name.startswith("Memcpy"):
        events[0]["cat"] = "gpu_memcpy"
    t = read(tmp_path, *events)
    assert [s.kind for s in t].count("comm") == 2 and t.notes == ()
    found = [s.name for s in t.select(kind="comm")]
    expected = COMMUNICATING[name]
    assert any(f == expected or f.startswith(expected) for f in found), found
    assert t.hidden_fraction == pytest.approx(0.5)  # 50..100 of 0..100


def test_every_row_of_the_table_is_of_use_and_computing_stays_computing():
    """Catches a row that an earlier one covers, or that no name fits."""
    first = {
        next(i for i, (p, _) in enumerate(kernels._TABLE) if p.search(n)) for n in COMMUNICATING
    }
    assert first == set(range(len(kernels.KERNELS)))
    assert all(why for *_, why in kernels.KERNELS)
    for name in COMPUTING:
        assert kernels.verb_of(name) is None and not kernels.looks_like_communication(name), name


def test_what_only_looks_like_communication_is_said(tmp_path):
    names = "my_AllReduce_v7", "(anonymous namespace)::dispatchKernel<16u>", "gemm", "fp8_mega_moe"
    events = [_kernel(name, 10 * i, 5, i) for i, name in enumerate(names)]
    events += [_kernel("peer_push", 50, 5, 3, **{"Collective name": "allreduce"})]  # annotated
    t = read(tmp_path, *events)
    assert t.notes == (
        "these names look like communication and were counted as computing: "
        "(anonymous namespace)::dispatchKernel<16u>, fp8_mega_moe, my_AllReduce_v7",
    )
    assert str(t).endswith(f"note: {t.notes[0]}") and len(t.select(kind="comm")) == 1
