# SPDX-License-Identifier: Apache-2.0
"""Contracts between overlay and base, on a base of a few lines."""

from __future__ import annotations

import textwrap

import pytest
from reshard_build.contracts import Contracts, require_contracts
from reshard_build.errors import ContractError
from reshard_build.universe import Universe

UPSTREAM = {
    "vllm/__init__.py": "",
    "vllm/api.py": "from vllm.base import *\nfrom vllm.base import Connector as Public\n",
    "vllm/base.py": """
        import enum
        from abc import ABC, abstractmethod
        from collections.abc import Callable
        from dataclasses import dataclass, field
        from typing import NamedTuple

        class Role(enum.Enum):
            WORKER = 1

        @dataclass
        class Config:
            size: int
            rank: int = 0
            names: list[str] = field(default_factory=list)
            cache: int = field(init=False)
            parallel: "Parallel | None" = None

        @dataclass(kw_only=True)
        class Parallel:
            world: int
            @property
            def leader(self) -> Config: ...

        class Pair(NamedTuple):
            left: int
            right: int = 0

        class Root(ABC):
            def __init__(self, config: Config, role: Role):
                self._config = config
                self.role = role
            @abstractmethod
            def load(self, request, *, late=False): ...
            @property
            def size(self) -> int: ...
            def done(self, ids: set[str]) -> None: ...
            @classmethod
            def build(cls, config): ...
            @staticmethod
            def count(config, n=1): ...

        class Connector(Root):
            def extra(self, a, /, b, *args, **kwargs): ...

        def helper(a, b=1, *, c): ...
        def wrapped(a): ...
        wrapped = object()
    """,
}
FINE = """
    from vllm.api import Config, Pair, Parallel, Public, Role, helper
    import vllm.base as base

    class Mine(Public):
        def __init__(self, config: Config, role, more):
            super().__init__(config, role)
            self.more = more
        def load(self, request, *, late=False, own=0): ...
        @property
        def size(self): return self.more + self._config.rank
        def done(self, ids):
            super().done(ids)
            self.extra(1, 2, 3, x=4)
            helper(1, c=self.role)
            self.count(ids, n=2)
            self.build(ids)
            return Role.WORKER, Config(1, names=[]), Pair(1), Parallel(world=1), base.Config(*ids)
"""


def _universe(own: str, upstream: dict[str, str] = UPSTREAM) -> Universe:
    files = {**upstream, "vllm/own.py": own}
    files = {path: textwrap.dedent(text) for path, text in files.items()}
    return Universe(frozenset(files), lambda path: files[path].encode())


def _breaches(own: str, upstream: dict[str, str] = UPSTREAM) -> list[str]:
    contracts = Contracts(_universe(own, upstream), ["vllm/own.py"])
    return [breach.text for breach in contracts.of("vllm/own.py")]


def test_what_fits_is_no_breach() -> None:
    """All the ways to use upstream that are right pass, and are counted."""
    contracts = Contracts(_universe(FINE), ["vllm/own.py"])
    assert contracts.of("vllm/own.py") == []
    assert contracts.checked > 15


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("def load(self, request, *, late=False, own=0)", "def other(self)", "Mine lacks load, wh"),
        ("late=False, own=0", "own=0", "Mine.load overrides Root.load but does not take late"),
        ("late=False, own=0", "late", "Mine.load overrides Root.load but requires late, which has"),
        ("request, *, late=False, own=0", "req, *, late=False", "takes req at position 1, not req"),
        ("own=0): ...", "own): ...", "Mine.load overrides Root.load but requires own, which up"),
        ("        @property\n", "", "Mine.size overrides Root.size but is no property"),
        ("def done(self, ids)", "async def done(self, ids)", "only one of them is a coroutine"),
        ("def done(self, ids)", "def done(self)", "Mine.done overrides Root.done but does not ta"),
        ("super().done(ids)", "super().gone(ids)", "asks super() for gone, which no base class ha"),
        ("super().done(ids)", "super().done()", "calls Root.done but lacks ids"),
        (
            "super().__init__(config, role)",
            "super().__init__(config)",
            "Root.__init__ but lacks ro",
        ),
        ("self._config.rank", "self._config.gone", "reads gone of Config, which has none"),
        ("self._config.rank", "self._config.parallel.gone", "reads gone of Parallel, which has n"),
        ("self._config.rank", "self._config.parallel.leader.gone", "reads gone of Config, which h"),
        ("self.more + ", "self.less + ", "reads less of Mine, which has none"),
        ("helper(1, c=self.role)", "helper(1)", "calls helper but lacks c"),
        ("helper(1, c=self.role)", "helper(1, 2, 3, c=4)", "gives 3 arguments by position, 2 fit"),
        ("helper(1, c=self.role)", "helper(1, c=2, d=3)", "calls helper but gives d, which does"),
        ("helper(1, c=self.role)", "helper(1, a=1, c=2)", "calls helper but gives a twice"),
        ("self.count(ids, n=2)", "self.count(ids, 1, 2)", "calls Root.count but gives 3 arguments"),
        ("self.build(ids)", "self.build()", "calls Root.build but lacks config"),
        ("Config(1, names=[])", "Config(1, cache=1)", "calls Config but gives cache, which does"),
        ("Config(1, names=[])", "Config()", "calls Config but lacks size"),
        ("base.Config(*ids)", "base.Config(gone=1, *ids)", "calls Config but gives gone, which"),
        ("Parallel(world=1)", "Parallel(1)", "calls Parallel but gives 1 arguments by position"),
        ("Pair(1)", "Pair(1, 2, 3)", "calls Pair but gives 3 arguments by position, 2 fit"),
        ("Role.WORKER", "Role.DRIVER", "reads DRIVER of Role, which has none"),
    ],
)
def test_each_breach_is_told(old: str, new: str, text: str) -> None:
    """One thing that does not fit is one breach, in words that name both sides."""
    assert old in FINE
    (found,) = _breaches(FINE.replace(old, new))
    assert text in found


@pytest.mark.parametrize(
    "own",
    [
        "from vllm.base import wrapped\nwrapped(1, 2)",
        "from vllm.base import helper\ndef f(helper): return helper()",
        "from vllm.base import helper\ndef f(x):\n    helper = x\n    return helper()",
        "from vllm.base import Config\ndef f(x: Config):\n"
        "    if isinstance(x, dict): return x.gone\n",
        "from vllm.base import Config, Pair\ndef f(x: Config | Pair): return x.gone",
        "from torch import Module\nclass A(Module):\n    def f(self): return self.gone",
        "from vllm.base import Connector\nfrom torch import Module\n"
        "class A(Connector, Module):\n    def load(self, *a, **k): return self.gone",
    ],
)
def test_what_cannot_be_known_is_not_claimed(own: str) -> None:
    """Rebound names, narrowed values, unions and classes from elsewhere are left alone."""
    assert _breaches(own) == []


@pytest.mark.parametrize(
    "own",
    [
        "from vllm.base import Config\ndef f(xs: list[Config]):\n    for x in xs: x.gone\n",
        "from vllm.base import Config\ndef f(xs: dict[str, Config]):\n"
        "    for k, x in xs.items(): x.gone\n",
        "from vllm.base import Config\ndef f(xs: dict[str, Config]): return [x.gone for x in "
        "xs.values()]\n",
        "from vllm.base import Config\ndef f(xs: dict[str, Config]): return xs['a'].gone\n",
        "from vllm.base import Config\ndef f(xs: list[Config]):\n"
        "    return [x.gone for n, x in enumerate(xs)]\n",
        "from vllm.base import Config\ndef f(ys, xs: list[Config]):\n"
        "    return {n: 1 for y, x in zip(ys, xs, strict=True) for n in x.gone}\n",
        "from vllm.base import Config\ndef f(): return Config(1).gone\n",
        "from vllm.base import Config\ndef f(x: 'Config | None'):\n    def g(): return x.gone\n",
        "def f():\n    from vllm.base import Config\n    x = Config(1)\n    return x.gone\n",
    ],
)
def test_values_are_followed(own: str) -> None:
    """Through loops, containers, constructors and inner functions an attribute is still known."""
    assert _breaches(own) == ["reads gone of Config, which has none"]


def test_patched_files_keep_to_the_overlay() -> None:
    """A call that a patch adds to a file of upstream has to fit the overlay's function."""
    files = {
        "vllm/own.py": "def hook(a): ...\n",
        "vllm/patched.py": "def f():\n    from vllm.own import hook\n    return hook(1, 2)\n",
    }
    universe = Universe(frozenset(files), lambda path: files[path].encode())
    with pytest.raises(ContractError) as raised:
        require_contracts(universe, ["vllm/own.py"], ["vllm/patched.py"], "the base")
    assert "the base breaks contracts" in str(raised.value)
    assert "vllm/patched.py:3 calls hook but gives 2 arguments by position, 1 fit" in str(
        raised.value
    )
