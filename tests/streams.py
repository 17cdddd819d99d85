"""Streams of a GPU that is not there: who waits for whom, written down."""

import pytest
import torch

GPU = torch.device("cuda", 0)


class Streams:
    """In place of those of `torch.cuda`: `log` has what is done on them; `now` is the current one.

    The first computes. Others are called by the order in which they are made.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.made: list[Stream] = []
        self.entered = [Stream(self, "computing")]
        monkeypatch.setattr(torch.cuda, "Stream", self.make)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.entered[-1])

    def make(self, device: torch.device) -> "Stream":
        """Return a new one."""
        self.made.append(Stream(self, f"lane {len(self.made)}", device))
        return self.made[-1]

    @property
    def now(self) -> str:
        """The name of the current one."""
        return self.entered[-1].name


class Stream:
    def __init__(self, streams: Streams, name: str, device: torch.device = GPU) -> None:
        self.streams, self.name, self.device = streams, name, device

    def wait_stream(self, other: "Stream") -> None:
        self.streams.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.streams.entered.append(self)

    def __exit__(self, *_: object) -> None:
        self.streams.entered.pop()
