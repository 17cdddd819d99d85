"""Which kernels of a GPU are communication, by their names, as data.

In a trace, only the name of a kernel tells communication from computing. Names of NCCL's kernels
begin with "nccl"; other libraries have other names. If such kernels counted as computing, they
would even seem to hide the communication of NCCL. A row is (pattern, verb, library).
The verb is left out where the name holds it, as in `ncclDevKernel_AllReduce_Sum_bf16_RING_LL`. The
first row that fits counts.
"""

import re

KERNELS: tuple[tuple[str, str, str], ...] = (
    (r"\b(nccl|rccl|oneccl_|hccl|hcom_)", "", "NCCL, RCCL, oneCCL of Intel, HCCL of Ascend"),
    (r"\bmscclKernel_|\bmscclpp", "", "MSCCL inside of RCCL; MSCCL++, by its argument types"),
    # layout:: only counts; prologues and epilogues copy on their own GPU
    (r"\b(deep_ep|uccl)::(?!layout)(?!\w+::\w+_(pro|epi)logue)", "all_to_all", "DeepEP, UCCL-EP"),
    (r"\bhybrid_ep::(dispatch|combine|device_sync)_kernel", "all_to_all", "DeepEP's hybrid_ep"),
    (r"\b(moeA2A|Ep|a2a_)(Dispatch|Combine)\w*(Kernel|_send|_recv)", "all_to_all", "experts of "
     "TensorRT-LLM, MoRI, pplx-garden"),
    (r"\b(one_shot|two_shot|multimem)(_one_shot)?_(all_reduce|reduce|all_gather)", "", "torch's "
     "symmetric memory; Triton's of that name"),
    (r"\b(all_to_all_vdev|allToAllV|exchangeSplit)", "all_to_all", "torch's symmetric memory"),
    (r"\b(nv|roc|i)shmem|_on_stream_kernel", "", "NVSHMEM, rocSHMEM"),
    (r"\b(cross_device_reduce|quickreduce::)", "all_reduce", "vLLM, SGLang, AITER"),
    (r"\b((lowPrecision)?(one|two)Shot_?AllReduce|allreduce_fusion_kernel)", "all_reduce",
     "TensorRT-LLM, AITER, FlashInfer"),
    (r"\bk?userbuffers_", "", "Transformer Engine"),
    (r"\bmemcpy ptop", "peer_copy", "a copy from one GPU to another"),
)  # fmt: skip

_TABLE = [(re.compile(pattern, re.IGNORECASE), verb) for pattern, verb, _ in KERNELS]
_ALIKE = re.compile(
    r"all_?reduce|all_?gather(?!_copy)|reduce_?scatter|all_?to_?all|a2a|p2p|peer|shmem|symm_?mem"
    r"|multimem|lamport|\b[a-z]{1,3}ccl(_|D|::(?!layout))|cross_device"
    r"|(dispatch|combine)_?(send|recv)|\brdma|::(dispatch|combine)Kernel|mega_moe",
    re.IGNORECASE,
)


def verb_of(name: str) -> str | None:
    """Return the verb of a kernel; "" if the name holds it, None for what is no communication."""
    return next((verb for pattern, verb in _TABLE if pattern.search(name)), None)


def looks_like_communication(name: str) -> bool:
    """Return True if a name that `verb_of` does not know sounds like communication."""
    return bool(_ALIKE.search(name))
