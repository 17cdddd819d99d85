"""A test whose body runs on every rank of a standing pool, and asserts there."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any


def on_ranks(size: int | str, backend: str = "gloo") -> Callable:
    """Run the decorated test on so many ranks, or on as many as its parameter of that name says.

    Its parameters travel to them.
    """

    def decorate(body: Callable) -> Callable:
        def test(ranks: Callable, **parameters: Any) -> None:
            pool = ranks(parameters.get(size, size), backend)
            pool.run(_run, body.__module__, body.__name__, parameters)

        own = inspect.signature(body).parameters.values()
        pool = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([pool, *own])  # which pytest reads
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.body = body
        return test

    return decorate


def _run(module: str, name: str, parameters: dict[str, Any]) -> None:
    """On a rank: what the test's name stands for in this process."""
    getattr(importlib.import_module(module), name).body(**parameters)
