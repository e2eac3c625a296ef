# SPDX-License-Identifier: Apache-2.0
"""What a sweep compares: a pair of layouts, and the engines at its ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from .caches import Caches
from .engine import Speculation
from .installation import Installation
from .layout import Layout

_ONE = Layout(1, 1)
STAGED = ("transfer_strategy", "staged")
_WORDS = {("early_dispatch", True): "early", ("seed_first_token", True): "seeded", STAGED: "staged"}
"""Options of the connector's that change how a request goes, and what tables call them."""


@dataclass(frozen=True)
class Side:
    """The engines of one role.

    Attributes:
        layout: of each.
        count: how many.
        args: more of the command line.
        env: more of the environment, as pairs.
        connector: what moves the KV cache; "upstream" for upstream's of the same name, at rest.
        speculation: how each drafts, if it does.
        options: more of the connector's, as pairs.
        caches: what their caches are like, if not as vLLM for CPU has them.
        second_runner: whether vLLM's second model runner runs them, by Triton's interpreter.
        installation: the vLLM that they run, if not this one.
    """

    layout: Layout = _ONE
    count: int = 1
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    connector: str = "NixlConnector"
    speculation: Speculation | None = None
    options: tuple[tuple[str, str | bool], ...] = ()
    caches: Caches | None = None
    second_runner: bool = False
    installation: Installation | None = None

    def has(self, option: str) -> bool:
        """Whether an option of the connector's is on."""
        return bool(dict(self.options).get(option))

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        stages = dict(self.env).get("VLLM_PP_LAYER_PARTITION")
        runner = "second runner" if self.second_runner else None
        options = [_WORDS[each] for each in self.options if each in _WORDS]
        said = (self.speculation, self.caches, runner, *options, self.installation)
        more = "".join(f", {each}" for each in said if each)
        return f"{times}{self.layout}" + (f" ({stages})" if stages else "") + more


@dataclass(frozen=True)
class Family:
    """A pair of layouts.

    Attributes:
        name: what is special about it.
        model: name of what is served.
        prefill: the prefill engines.
        decode: the decode engines.
        exact: whether answers have to be equal; where not, as at bfloat16, most tokens have to.
        args: more of every engine's command line.
        one: the engine of one rank whose answers are right.
    """

    name: str
    model: str
    prefill: Side
    decode: Side
    exact: bool = True
    args: tuple[str, ...] = ()
    one: Side = field(default_factory=Side)

    @property
    def sides(self) -> tuple[Side, Side, Side]:
        """All engines that it needs."""
        return self.prefill, self.decode, self.one
