"""A parameter that lives on the host and computes on the device: a part of offload.py."""

import torch
from torch import Tensor, nn

from minipar.comm.hostcopy import HostCopy
from minipar.observe import memory


class OffloadedParameter:
    """A parameter that lives on the host, and whose copy on the device computes.

    The device's copy keeps its storage, so that a flat buffer which it is a view of stays in use.
    """

    def __init__(
        self, param: nn.Parameter, copies: HostCopy, compute_dtype: torch.dtype | None = None
    ) -> None:
        self.param, self.copies = param, copies
        dtype = compute_dtype if param.is_floating_point() else None  # complex ones stay complex
        self.device = param.data.to(dtype or param.dtype)
        [self.host] = copies.to_host([param.data]).wait()
        memory.tag("parameters", self.device, on_host=False)
        memory.tag("parameters", self.host, on_host=True)
        param.homes = self.device, self.host  # for those who count memory
        self.version = param._version  # of the weights that both homes hold
        self.on_host, self.place = False, param.data_ptr()

    def go_to_host(self) -> None:
        """Let `param.data` be that of the host. A gradient on the device does not come along."""
        if self.on_host:
            return
        self._check_place()
        if self.is_stale():  # weights were written into the device's copy
            [weights] = self.copies.to_host([self.device]).wait()
            self.host.copy_(weights)
        self.param.grad = None
        self._live_in(self.host)
        self.version, self.on_host = self.param._version, True

    def go_to_device(self) -> None:
        """Let `param.data` be that of the device; a gradient that has accumulated comes along."""
        if not self.on_host:
            return
        self._check_place()
        gradient, self.param.grad = self.param.grad, None
        self._live_in(self.device)
        self.on_host = False
        if gradient is not None:
            self.param.grad = torch.empty_like(self.device)
            source = cast(gradient, self.param.grad, self.copies)
            self.copies.to_device([(source, self.param.grad)]).wait()

    def _live_in(self, home: Tensor) -> None:
        self.param.data, self.place = home, home.data_ptr()

    def _check_place(self) -> None:
        """Raise `RuntimeError` where the parameter is in neither of its homes."""
        if self.param.data_ptr() != self.place:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.param.shape)} has got new memory since offload, "
                f"as by p.data = ..., vector_to_parameters or model.to(): write into it, as by "
                f"p.copy_(...) under torch.no_grad(), or move and cast the model before"
            )

    def news(self) -> tuple[Tensor, Tensor]:
        """What has to be copied to bring the weights of the host to the device."""
        self.version = self.param._version
        return cast(self.host, self.device, self.copies), self.device

    def is_stale(self) -> bool:
        """Whether `param` was written to since both homes were equal."""
        return self.version != self.param._version


def cast(on_host: Tensor, like: Tensor, copies: HostCopy) -> Tensor:
    """Return `on_host` in the dtype of `like`, in memory that a GPU reads while it computes."""
    same = on_host.dtype == like.dtype
    return on_host if same else copies.empty_like(like).copy_(on_host)


def state_to_host(optimizer: torch.optim.Optimizer, copies: HostCopy) -> None:
    """Copy what state there is on the device, made or loaded before; know what is of the host."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.untyped_storage() not in memory.tags:
                if not memory.is_on_host():
                    [state[key]] = copies.to_host([value]).wait()
                memory.tag("optimizer", state[key], on_host=True)
