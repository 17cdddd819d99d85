"""Give all ranks the tensors of one rank, such as the first weights."""

from collections import defaultdict
from itertools import zip_longest

from torch import Tensor, nn

from minipar.comm.collectives import all_gather_object, broadcast
from minipar.comm.mesh import Axis
from minipar.parallel.base.shards import copies_axis, is_spread_over
from minipar.parallel.base.strategy import share_counts


def replicate(model: nn.Module, axis: Axis, *, is_data: bool = False) -> None:
    """Give all ranks of `axis` the parameters and buffers of its rank 0, in place.

    If the axis `is_data`, an expert goes only to the ranks that have copies of this expert, and
    routers count the tokens of all ranks. Raises `ValueError` on all ranks where models differ in
    names, shapes or dtypes.
    """
    if is_data:
        share_counts(model, axis)
    alike: dict[Axis, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta or is_spread_over(tensor, axis):
            continue  # all ranks make the same first value later; or each rank has other experts
        alike[copies_axis(tensor, axis) if is_data else axis][name] = tensor
    for those, tensors in alike.items():
        own = [f"{name} {tuple(t.shape)} of {t.dtype}" for name, t in tensors.items()]
        own += [f"{name} that learns" for name, t in tensors.items() if t.requires_grad]
        every = all_gather_object(own, those)
        for r, theirs in enumerate(every):
            for first, other in zip_longest(every[0], theirs):
                if first != other:
                    who = f"ranks 0 and {r} of {those.name}"
                    raise ValueError(f"{who} have different models: {first} and {other}")
        values = [t.data for t in tensors.values() if t.numel()]
        for pending in [broadcast(t, those, out=t, async_op=True) for t in values]:
            pending.wait()
