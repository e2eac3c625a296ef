# SPDX-License-Identifier: Apache-2.0
"""What the fork cures with patches, and a vLLM as released therefore lacks, by configuration.

The connector says so when an engine starts, and not when its first request hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """What of an engine's configuration decides.

    Attributes:
        device_type: As vLLM's platform names it.
        pp_size: Number of pipeline stages.
        num_workers: Processes that compute for one engine.
        compiles: Whether the model is compiled, and with that run once before the first request.
        pools: Whether the model returns embeddings or scores.
        v2_runner: Whether it is run by vLLM's second model runner.
    """

    device_type: str
    pp_size: int
    num_workers: int
    compiles: bool
    pools: bool
    v2_runner: bool


@dataclass(frozen=True)
class Limit:
    """One thing that vLLM as released cannot do.

    Attributes:
        name: How the documentation calls it.
        applies: Whether a configuration comes upon it.
        consequence: What would happen, for the log.
        remedy: What to do about it.
        fatal: Whether requests could not be served.
    """

    name: str
    applies: Callable[[Needs], bool]
    consequence: str
    remedy: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.consequence}: {self.remedy}"


LIMITS = (
    Limit(
        name="pipeline stages on CPU in eager mode",
        applies=lambda it: it.device_type == "cpu" and it.pp_size > 1 and not it.compiles,
        consequence="vLLM as released gives later stages their buffers in a run before the first "
        "request, which it leaves out here, and would end at that request",
        remedy="leave out --enforce-eager, or use the fork",
        fatal=True,
    ),
    Limit(
        name="pipeline stages of pooling models",
        applies=lambda it: it.pools and it.pp_size > 1 and not it.v2_runner,
        consequence="the first model runner of vLLM as released reports no transfers of stages "
        "before the last, so that blocks would never be given back",
        remedy="use --pipeline-parallel-size 1, or the fork",
        fatal=True,
    ),
    Limit(
        name="pipeline stages beside other connectors",
        applies=lambda it: it.pp_size > 1,
        consequence="MultiConnector of vLLM as released refuses stages if one of its children does "
        "not tell them apart, as OffloadingConnector",
        remedy="use --pipeline-parallel-size 1 with such a child, or the fork",
        fatal=False,
    ),
    Limit(
        name="rest on CPU",
        applies=lambda it: it.device_type == "cpu" and it.num_workers > 1,
        consequence="workers of vLLM as released keep a core busy while they have nothing to do",
        remedy="give every worker a core, or use the fork",
        fatal=False,
    ),
)


def limits_of(needs: Needs, limits: Iterable[Limit] = LIMITS) -> list[Limit]:
    """Return those that an engine comes upon.

    Args:
        needs: What its configuration asks for.
        limits: All that there are.
    """
    return [limit for limit in limits if limit.applies(needs)]
