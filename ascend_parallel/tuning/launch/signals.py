"""Signals that end a program, turned into what Python's clean-up understands."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, so that clean-up code runs."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handlers(leave, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Keep a second Ctrl-C or SIGTERM from breaking off the clean-up."""
    with _handlers(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _handlers(handler: Callable[..., Any] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
