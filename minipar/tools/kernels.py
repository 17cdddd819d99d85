"""Which kernels of a GPU are communication, by their names, as data.

A profiler tells communication from computing by nothing but the name of a kernel. NCCL's start with
its own; other libraries move data in kernels of their own names, and a picture that took these for
computing would call them hidden work, or let them hide NCCL's. A row is (pattern, verb, what it is
and where the names stand). The verb is left out where the name holds it, as in
`ncclDevKernel_AllReduce_Sum_bf16_RING_LL`. The first row that fits counts.
"""

import re

KERNELS: tuple[tuple[str, str, str], ...] = (
    (r"\bnccl|\brccl", "", "NCCL, RCCL: nccl(Symk)DevKernel_*; torchcomms' nccl*Ctran*"),
    (r"\bmscclKernel_", "", "MSCCL's algorithms inside of RCCL (src/include/msccl/msccl_kernel.h)"),
    (r"\bmscclpp", "", "MSCCL++: known by its argument types (microsoft/mscclpp)"),
    (r"\boneccl_", "", "oneCCL's kernels on Intel's GPUs, such as oneccl_allreduce_pcie"),
    (r"\bhcom_|\bhccl", "", "HCCL on Ascend: hcom_allReduce_, hcom_alltoallv_"),
    (
        r"\b(deep_ep|uccl)::(?!layout)(?!\w+::\w+_(pro|epi)logue)",
        "all_to_all",
        "DeepEP, v2 too (csrc/kernels, deep_ep/include/deep_ep/impls), and UCCL-EP (ep/src); "
        "layout:: only counts, and what begins or ends a call of v2 copies on its own GPU",
    ),
    (r"\bhybrid_ep::(dispatch|combine|device_sync)_kernel", "all_to_all", "DeepEP's hybrid_ep"),
    (
        r"\ba2a_(dispatch|combine)_(send|recv)|\(anonymous namespace\)::(dispatch|combine)Kernel<",
        "all_to_all",
        "Perplexity's pplx-garden (a2a-kernels/src/a2a) and pplx-kernels (csrc/all_to_all)",
    ),
    (r"\bEp(Dispatch|Combine)\w*Kernel", "all_to_all", "MoRI's experts (ROCm/mori, src/ops)"),
    (r"\bmoeA2A(Dispatch|Combine)", "all_to_all", "TensorRT-LLM's experts (moeAlltoAllKernels.cu)"),
    (
        r"\b(one_shot|two_shot|multimem)(_one_shot)?_(all_reduce|reduce|all_gather)",
        "",
        "torch's symmetric memory (symm_mem/CUDASymmetricMemoryOps.cu); Triton's of that name",
    ),
    (r"\b(all_to_all_vdev|allToAllV|exchangeSplit)", "all_to_all", "symm_mem/nvshmem_extension.cu"),
    (r"\b(nv|roc|i)shmem|_on_stream_kernel", "", "NVSHMEM, rocSHMEM (src/host/stream/coll)"),
    (r"\bcross_device_reduce", "all_reduce", "vLLM, SGLang, AITER (csrc/custom_all_reduce.cuh)"),
    (
        r"\breduce_scatter_cross_device_store",
        "reduce_scatter",
        "AITER's all-reduce fused with a norm; local_device_load_* ends it (custom_all_reduce.cuh)",
    ),
    (
        r"\bdda(AllReduce|AllGather|ReduceScatter|AllToAll)",
        "",
        "torchcomms (comms/common/algorithms)",
    ),
    (r"\bquickreduce::", "all_reduce", "QuickReduce of vLLM and AITER (csrc/quickreduce)"),
    (
        r"\b(lowPrecision)?(one|two)Shot_?AllReduce|\ballreduce_fusion_kernel",
        "all_reduce",
        "TensorRT-LLM (customAllReduceKernels.cu, allReduceFusionKernels.cu, userbuffers), AITER, "
        "FlashInfer (trtllm_allreduce_fusion.cuh)",
    ),
    (r"\bk?userbuffers_", "", "Transformer Engine's overlap (comm_gemm_overlap/userbuffers.cu)"),
    (r"\bmemcpy ptop", "peer_copy", "a copy from one GPU to another (CUPTI's MEMCPY_KIND_PTOP)"),
)

_TABLE = [(re.compile(pattern, re.IGNORECASE), verb) for pattern, verb, _ in KERNELS]
_ALIKE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|a2a|p2p|peer|shmem|symm_?mem|multimem"
    r"|lamport|\b[a-z]{1,3}ccl(_|D|::(?!layout))|cross_device|(dispatch|combine)_?(send|recv)"
    r"|\brdma",
    re.IGNORECASE,
)


def verb_of(name: str) -> str | None:
    """What a kernel of this name communicates: a verb, "" for one to be read in it; None: nothing.

    >>> verb_of("void vllm::cross_device_reduce_1stage<float, 2>(...)")
    'all_reduce'
    """
    return next((verb for pattern, verb in _TABLE if pattern.search(name)), None)


def looks_like_communication(name: str) -> bool:
    """Whether a name that `verb_of` does not know sounds like communication, so that it is said."""
    return bool(_ALIKE.search(name))
