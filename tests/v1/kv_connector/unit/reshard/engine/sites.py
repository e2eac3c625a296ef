# SPDX-License-Identifier: Apache-2.0
"""The calls that the connector's own code makes on its threads, any of which may raise once.

They are found by running: every function and method of the package that works on a connector's
thread is wrapped, with those of NIXL's agent, and each line that calls one of them is a *site*.
Nothing here names a function, so that nothing is forgotten when one is added.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, ModuleType
from typing import NamedTuple

import pytest
from vllm.distributed.nixl_utils import NixlWrapper

from vllm.distributed.kv_transfer.kv_connector.v1 import reshard

_PACKAGE = reshard.__name__ + "."
_FLOORS = tuple(
    _PACKAGE + floor for floor in ("engine.", "transport.", "protocol.", "memory.", "plan.")
)
_NOT_ITS_THREADS = ("reshard-handshake-server",)
"""That one is the scheduler's."""


class Site(NamedTuple):
    """A line of the package that calls something.

    Attributes:
        caller: Its file, from the package on.
        line: The line.
        callee: What it calls.
    """

    caller: str
    line: int
    callee: str


class Calls:
    """Counts what is called at which site, and raises where it is told to.

    Attributes:
        counted: How often each site was passed since `count`, by the connector's threads.
        raised_in: The thread in which a fault was raised since `plant`; None as long as none was.
    """

    def __init__(self) -> None:
        self.counted: Counter[Site] = Counter()
        self.raised_in: str | None = None
        self._lock = threading.Lock()
        self._is_on = False
        self._planted: tuple[Site, int, Exception] | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count, and raise what is planted, within."""
        self.counted.clear()
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            self._planted = None

    def plant(self, site: Site, number: int, fault: Exception) -> None:
        """Have a fault raised, once, when a site is passed for the so many-th time."""
        self.raised_in = None
        self._planted = site, number, fault

    def wrap(self, function: Callable, name: str) -> Callable:
        """The same function, each call of which is counted."""

        @wraps(function)
        def call(*arguments, **options):
            if self._is_on:
                self._pass(name)
            return function(*arguments, **options)

        return call

    def _pass(self, callee: str) -> None:
        thread = threading.current_thread().name
        if not thread.startswith("reshard-") or thread.startswith(_NOT_ITS_THREADS):
            return
        frame = sys._getframe(2)
        _, is_ours, caller = frame.f_code.co_filename.partition("/v1/reshard/")
        if not is_ours or "/tests/" in frame.f_code.co_filename:
            # A callback, which the library that calls it guards.
            return
        site = Site(caller, frame.f_lineno, callee)
        with self._lock:
            self.counted[site] += 1
            planted = self._planted
            if planted is None or planted[0] != site or planted[1] != self.counted[site]:
                return
            self._planted, self.raised_in = None, thread
        raise planted[2]


@contextmanager
def all_calls() -> Iterator[Calls]:
    """Wrap all functions of the package, and of NIXL's agents."""
    calls = Calls()
    with pytest.MonkeyPatch.context() as patch:
        modules = [each for name, each in sys.modules.items() if name.startswith(_FLOORS)]
        everywhere = [each for name, each in sys.modules.items() if name.startswith(_PACKAGE)]
        for module in modules:
            for name, value in list(vars(module).items()):
                if getattr(value, "__module__", None) != module.__name__:
                    continue
                if isinstance(value, FunctionType):
                    wrapped = calls.wrap(value, name)
                    for other in everywhere:
                        for alias, found in list(vars(other).items()):
                            if found is value:
                                patch.setattr(other, alias, wrapped)
                elif isinstance(value, type):
                    _wrap_class(calls, patch, value, module)
        _wrap_class(calls, patch, NixlWrapper, sys.modules[NixlWrapper.__module__])
        yield calls


def _wrap_class(calls: Calls, patch: pytest.MonkeyPatch, cls: type, module: ModuleType) -> None:
    for name, value in list(vars(cls).items()):
        qualified = f"{cls.__name__}.{name}"
        if name.startswith("__") and name != "__len__":
            continue
        if isinstance(value, FunctionType):
            patch.setattr(cls, name, calls.wrap(value, qualified))
        elif isinstance(value, property) and value.fget is not None:
            getter = calls.wrap(value.fget, qualified)
            patch.setattr(cls, name, property(getter, value.fset, value.fdel, value.__doc__))
        elif isinstance(value, classmethod | staticmethod):
            kind = type(value)
            patch.setattr(cls, name, kind(calls.wrap(value.__func__, qualified)))
