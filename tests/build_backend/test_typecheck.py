# SPDX-License-Identifier: Apache-2.0
"""The overlay against a base of a few lines, as pyright sees it."""

from __future__ import annotations

import textwrap
from collections import defaultdict

import pytest
from reshard_build.errors import TypeCheckError
from reshard_build.typecheck import Finding, check, differences, require_types, switches

BASE = {
    "vllm/__init__.py": "",
    "vllm/api.py": "from vllm.base import *\nfrom vllm.base import Connector as Public\n",
    "vllm/base.py": """
        import enum
        from abc import ABC, abstractmethod
        from dataclasses import dataclass, field
        from typing import Any, NamedTuple

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
            def done(self, ids: set[str]) -> Any: ...
            def seen(self) -> bool: ...
            @classmethod
            def build(cls, config): ...
            @staticmethod
            def count(config, n=1): ...

        class Connector(Root):
            def extra(self, a, /, b, *args, **kwargs): ...

        def helper(a, b=1, *, c): ...
    """,
}
FINE = """
    from typing import final
    from vllm.api import Config, Pair, Parallel, Public, Role, helper
    import vllm.base as base

    @final
    class Mine(Public):
        def __init__(self, config: Config, role, more):
            super().__init__(config, role)
            self.more = more
        def load(self, request, *, late=False, own=0): ...
        @property
        def size(self): return self.more + self._config.rank
        def seen(self) -> bool: return True
        def done(self, ids):
            super().done(ids)
            self.extra(1, 2, 3, x=4)
            helper(1, c=self.role)
            self.count(ids, n=2)
            self.build(ids)
            return Role.WORKER, Config(1, names=[]), Pair(1), Parallel(world=1), base.Config(*ids)
"""

PLANTED = [
    ("def load(self, request, *, late=False, own=0)", "def other(self)"),
    ("late=False, own=0", "own=0"),
    ("late=False, own=0", "late"),
    ("request, *, late=False, own=0", "req, *, late=False"),
    ("own=0): ...", "own): ..."),
    ("        @property\n", ""),
    ("def seen(self)", "async def seen(self)"),
    ("def done(self, ids)", "def done(self)"),
    ("super().done(ids)", "super().gone(ids)"),
    ("super().done(ids)", "super().done()"),
    ("super().__init__(config, role)", "super().__init__(config)"),
    ("self._config.rank", "self._config.gone"),
    ("self._config.rank", "self._config.parallel.gone"),
    ("self._config.rank", "self._config.parallel.leader.gone"),
    ("self.more + ", "self.less + "),
    ("helper(1, c=self.role)", "helper(1)"),
    ("helper(1, c=self.role)", "helper(1, 2, 3, c=4)"),
    ("helper(1, c=self.role)", "helper(1, c=2, d=3)"),
    ("helper(1, c=self.role)", "helper(1, a=1, c=2)"),
    ("self.count(ids, n=2)", "self.count(ids, 1, 2)"),
    ("self.build(ids)", "self.build()"),
    ("Config(1, names=[])", "Config(1, cache=1)"),
    ("Config(1, names=[])", "Config()"),
    ("base.Config(*ids)", "base.Config(gone=1, *ids)"),
    ("Parallel(world=1)", "Parallel(1)"),
    ("Pair(1)", "Pair(1, 2, 3)"),
    ("Role.WORKER", "Role.DRIVER"),
    ("Pair, Parallel", "Pair, Gone, Parallel"),
    ("import vllm.base as base", "import vllm.base as base\n    import vllm.gone"),
    ("import vllm.base as base", "import vllm.base as base\n    from vllm.gone import a"),
]

READS = [
    "from vllm.base import Config\ndef f(xs: list[Config]):\n    for x in xs: x.gone\n",
    "from vllm.base import Config\ndef f(xs: dict[str, Config]):\n    return xs['a'].gone\n",
    "from vllm.base import Config\ndef f(ys, xs: list[Config]):\n"
    "    return {n: 1 for y, x in zip(ys, xs, strict=True) for n in x.gone}\n",
    "from vllm.base import Config\ndef f(x: 'Config | None'):\n    def g(): return x.gone\n",
    "def f():\n    from vllm.base import Config\n    x = Config(1)\n    return x.gone\n",
]

COMPAT = """\
from packaging.version import Version
_IS_OLD = Version("0").release < (1, 0)
HAS_VIEW = not _IS_OLD
if _IS_OLD:
    from vllm.old import shape
else:
    from vllm.new import View
"""
USE = """\
from vllm.own.compat import HAS_VIEW
def read():
    if not HAS_VIEW:
        from vllm.old import only_old
        return only_old(1, 2)
    from vllm.new import only_new
    return only_new(1)
"""
NEW = {"vllm/new.py": "class View: ...\ndef only_new(a): ...\n"}
OLD = {"vllm/old.py": "def shape(): ...\ndef only_old(a, b): ...\n"}


def _found(own: dict[str, str]) -> dict[str, list[Finding]]:
    """What does not hold, by file."""
    files = {**BASE, **own}
    modules = {path: textwrap.dedent(text).encode() for path, text in files.items()}
    found: dict[str, list[Finding]] = defaultdict(list)
    for each in check(modules, own, {}, (1, 0)):
        found[each.path].append(each)
    return found


@pytest.fixture(scope="module")
def planted() -> dict[str, list[Finding]]:
    """What is found in files with one defect each, and in one without."""
    own = {f"vllm/own_{number}.py": FINE.replace(*each) for number, each in enumerate(PLANTED)}
    own |= {f"vllm/reads_{number}.py": each for number, each in enumerate(READS)}
    return _found({**own, "vllm/fine.py": FINE})


def test_what_fits_is_not_told(planted: dict[str, list[Finding]]) -> None:
    """All the ways to use upstream that are right pass."""
    assert planted["vllm/fine.py"] == []


@pytest.mark.parametrize("number", range(len(PLANTED)), ids=lambda n: PLANTED[n][1].strip()[:40])
def test_each_defect_is_told(planted: dict[str, list[Finding]], number: int) -> None:
    """With file and line."""
    assert FINE.count(PLANTED[number][0])
    assert planted[f"vllm/own_{number}.py"]


@pytest.mark.parametrize("number", range(len(READS)))
def test_values_are_followed(planted: dict[str, list[Finding]], number: int) -> None:
    """Through loops, containers, constructors and inner functions an attribute is still known."""
    (found,) = planted[f"vllm/reads_{number}.py"]
    assert '"gone" is unknown' in found.text


@pytest.mark.parametrize(("base", "release"), [(NEW, (1, 0)), (OLD, (0, 9))], ids=["new", "old"])
def test_only_what_runs_on_the_base_is_checked(
    base: dict[str, str], release: tuple[int, ...]
) -> None:
    """On either base, also where a module imports the switch, the other branch is no fault."""
    own = {"vllm/own/__init__.py": "", "vllm/own/compat.py": COMPAT, "vllm/own/use.py": USE}
    modules = {path: text.encode() for path, text in {**BASE, **base, **own}.items()}
    assert check(modules, own, {}, release) == []
    wrong = {**modules, "vllm/own/use.py": USE.replace("(1)", "()").replace("2)", ")").encode()}
    assert [each.path for each in check(wrong, own, {}, release)] == ["vllm/own/use.py"]


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("A = Version(v).release < (1, 0)", {"A": False}),
        ("A = Version(v).release >= (1, 0)\nB = not A\nC = B", {"A": True, "B": False, "C": False}),
        ("A = Version(v).release > floor", {}),
        ("A = B\nif C:\n    D = Version(v).release < (1, 0)", {}),
        ("def broken(", {}),
    ],
)
def test_switches_are_what_the_release_decides(source: str, known: dict[str, bool]) -> None:
    """What else there is, and what cannot be read, is none."""
    assert switches(source.encode(), (1, 0)) == known


def test_patched_files_keep_to_the_overlay() -> None:
    """A call that a patch adds has to fit; what was wrong before is upstream's."""
    before = "def g(x: int): return x.upstreams\n"
    after = f"def f():\n    from vllm.own import hook\n    return hook(1, 2)\n{before}"
    own, patched = b"def hook(a): ...\n", after.encode()
    modules = {"vllm/__init__.py": b"", "vllm/own.py": own, "vllm/patched.py": patched}
    with pytest.raises(TypeCheckError) as raised:
        require_types(
            modules, ["vllm/own.py"], {"vllm/patched.py": before.encode()}, (1, 0), "the base"
        )
    assert "on the base the overlay does not fit: vllm/patched.py:3 Expected 1" in str(raised.value)
    assert "upstreams" not in str(raised.value)


def test_pyright_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install."""
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(TypeCheckError, match=r"install requirements/lint\.txt"):
        check({"vllm/own.py": b""}, ["vllm/own.py"], {}, (1, 0))


LOOKS = b"""
import vllm.plain.inner
from vllm import late
from vllm.star import *
from .beside import name
def run():
    from vllm.inside import deep
"""


@pytest.mark.parametrize(
    ("path", "is_needed"),
    [
        ("vllm/own/mine.py", True),
        ("vllm/__init__.py", True),
        ("vllm/plain/__init__.py", True),
        ("vllm/plain/inner.py", True),
        ("vllm/late.py", True),
        ("vllm/star.pyi", True),
        ("vllm/own/beside.py", True),
        ("vllm/inside/deep.py", True),
        ("vllm/plain/other.py", False),
        ("vllm/inside/deeper.py", False),
        ("vllm/third_party/bundled.py", False),
    ],
)
@pytest.mark.parametrize("other", [b"NEW = 1", None])
def test_wheels_differ_where_we_look(path, is_needed, other):
    """In what is checked, in what it imports anywhere, in packages on the way, and nowhere else."""
    one = {path: b"OLD = 1"} | {"vllm/own/mine.py": LOOKS}
    two = {"vllm/own/mine.py": LOOKS} | ({} if other is None else {path: other})
    if path == "vllm/own/mine.py":
        two = {path: LOOKS + b"more = 1"}
    assert differences(one, two, ["vllm/own/mine.py"]) == (1, [path] if is_needed else [])


def test_bodies_of_annotated_functions_are_nobody_elses():
    """What others see of a module is compared: a method's body says what its object has."""
    module = "def f(a) -> int:\n    {}\nclass A:\n    def g(self) -> None:\n        {}\n"
    one, two, three = (
        {"vllm/own.py": b"import vllm.a", "vllm/a.py": module.format(*bodies).encode()}
        for bodies in (("pass", "pass"), ("return 1", "pass"), ("pass", "self.a = 1"))
    )
    assert differences(one, two, ["vllm/own.py"]) == (1, [])
    assert differences(one, three, ["vllm/own.py"]) == (1, ["vllm/a.py"])
