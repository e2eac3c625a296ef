# SPDX-License-Identifier: Apache-2.0
"""Whether engines would exchange their caches: with this connector, or with stock vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .engines import Answer


class Outcome(Enum):
    """What becomes of two engines."""

    SERVED = "served"
    STOCK = "left to stock vLLM's"
    REFUSED = "refused"
    UNKNOWN = "not known here"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of two engines, and why.

    Attributes:
        outcome: What becomes of them.
        why: The reason if they are not served, else the hardware; without a full stop.
        against_stock: Why stock vLLM's connector would not serve them; None if it would, or if
            that cannot be told.
        knows_stock: True if that can be told.
    """

    outcome: Outcome
    why: str
    against_stock: str | None = None
    knows_stock: bool = True

    def __str__(self) -> str:
        if self.outcome is Outcome.STOCK:
            return f"Left to stock vLLM's connector, which serves it: {self.why}."
        if self.outcome is Outcome.UNKNOWN:
            return f"Not known without a GPU: {self.why}. Run kv-plan where engines will run."
        said = "Served by this connector, on" if self.outcome is Outcome.SERVED else "Refused:"
        stock = (
            f" would not: {self.against_stock}" if self.against_stock else " would serve it, too"
        )
        return f"{said} {self.why}." + f" Stock vLLM's{stock}." * self.knows_stock


def judge(answer: Answer, refusal: str | None = None) -> Verdict:
    """Judge two engines.

    Args:
        answer: The engines.
        refusal: Why one of them would refuse the other at the handshake; None if it would not.
    """
    against = _against_stock(answer)
    prefill, decode = answer.engines
    if fault := prefill.fault or decode.fault:
        return Verdict(Outcome.REFUSED, fault, against, knows_stock=against is not None)
    if left := prefill.left or decode.left:
        if against is None:
            return Verdict(Outcome.STOCK, left)
        return Verdict(Outcome.REFUSED, f"left to stock vLLM's ({left})", against)
    if refusal is not None:
        return Verdict(Outcome.REFUSED, refusal, against, knows_stock=against is not None)
    return Verdict(Outcome.SERVED, _hardware(answer), against)


def _hardware(answer: Answer) -> str:
    names = ", ".join(sorted({*answer.engines[0].backends, *answer.engines[1].backends}))
    if answer.device is None:
        return "any hardware whose attention backends keep each token of a head in a slot"
    if answer.device == "cpu":
        return f"this machine's CPU ({names}), engines on machines with the same instructions"
    return f"GPUs whose attention backends keep what these do ({names})"


def _against_stock(answer: Answer) -> str | None:
    """Return why stock vLLM's connector would not serve two engines, from its documented limits."""
    meshes = [each.layout.mesh for each in answer.engines]
    shares = [each.layout.num_shares for each in answer.engines]
    tp_sizes = sorted(mesh.tp_size for mesh in meshes)
    if max(mesh.pp_size for mesh in meshes) > 1:
        return "it has no pipeline stages"
    if tp_sizes[1] % tp_sizes[0]:
        return f"of TP {tp_sizes[0]} and {tp_sizes[1]}, neither divides the other"
    if any(1 < num < mesh.tp_size for num, mesh in zip(shares, meshes, strict=True)):
        return "it shares tokens out among all ranks or none"
    if answer.has_state:
        return "recurrent state needs VLLM_SSM_CONV_STATE_LAYOUT=DS there"
    return None
