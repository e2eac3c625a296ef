# SPDX-License-Identifier: Apache-2.0
"""What must hold whatever the nemesis does: a function of the history, which touches nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from .faults import EARLY, STOPS
from .history import Footprint, History, Lull, Request

_MIB = 1 << 20
_SHOWN_CHARACTERS = 60


class Invariant(str, Enum):
    """What must hold."""

    ANSWERS = "every answer with status 200 is one engine's, token by token"
    DEADLINES = "every request ends within its deadline"
    SERVICE = "once a fault is healed, every pair of engines answers"
    POOLS = "once a fault is healed, every pool comes back whole"
    FOOTPRINT = "memory, descriptors and threads do not grow"
    LIFE = "no engine ends that was not killed"
    EARLY = "a request that waits for a prompt ends soon after its engine was struck"
    TESTED = "prompts are waited for, and read while they are computed"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Bounds:
    """By how much the processes of an engine may take more than in its first lull.

    It is not nothing: allocators keep what they had, pools of threads are filled on demand, and
    each of up to two workers has an agent more once a peer has broken, and one for each lane
    that still drains, with some 55 descriptors each: six of them were seen on a loaded machine. It
    is little against what is leaked if each of a few thousand requests leaks anything.
    """

    rss_bytes: int = 384 * _MIB
    descriptors: int = 384
    threads: int = 32


@dataclass(frozen=True)
class Violation:
    """Something that must not be.

    Attributes:
        round: in which round.
        at_s: when it was so.
        subject: who is concerned: the name of an engine, or of who was asked.
        what: in a sentence.
    """

    round: int
    at_s: float
    invariant: Invariant
    subject: str
    what: str


def check(
    history: History, answers: Sequence[str], bounds: Bounds | None = None
) -> list[Violation]:
    """Return all that must not be, the first one first.

    Args:
        answers: the right answer of each turn.
    """
    found = [
        *_wrong_answers(history, answers),
        *_late_requests(history),
        *_unserved_probes(history),
        *_pools_not_whole(history),
        *_growth(history, bounds or Bounds()),
        *_unwanted_ends(history),
        *_late_news(history),
    ]
    return sorted(found, key=lambda violation: violation.at_s)


def check_whole(history: History) -> list[Violation]:
    """Return what was never tested of what must hold, once a soak is over.

    Where all requests are serial, or none has blocks early, all else holds as well.
    """
    works = history.work().values()
    seen = {
        "no engine has waited for a prompt": sum(each.early for each in works),
        "no byte was read before its prompt was offered": sum(
            each.prefetched_bytes for each in works
        ),
    }
    last = history.lulls[-1] if history.lulls else Lull(0, 0.0, 0.0, ())
    struck = {each.round for each in history.strikes}
    return [
        *(
            Violation(each.round, each.healed_s, Invariant.TESTED, each.target, each.detail)
            for each in history.faults
            if each.kind in EARLY and each.round not in struck
        ),
        *(
            Violation(last.round, last.ended_s, Invariant.TESTED, "decode engines", what)
            for what, count in seen.items()
            if not count
        ),
    ]


def allowed_s(request: Request, history: History) -> float:
    """Return how long a request may take.

    Who is stopped cannot answer, and who waits for him is not late: the time in which an engine was
    stopped does not count, but for requests whose own engines ran.
    """
    if request.strict:
        return request.deadline_s
    stopped_s = 0.0
    for fault in history.faults:
        if fault.kind in STOPS:
            both_s = min(fault.healed_s, request.ended_s) - max(fault.began_s, request.sent_s)
            stopped_s += max(0.0, both_s)
    return request.deadline_s + stopped_s


def _wrong_answers(history: History, answers: Sequence[str]) -> Iterator[Violation]:
    for request in history.requests:
        if request.status != 200:
            continue
        right = answers[request.turn]
        if request.complete and len(request.answers) != request.num_answers:
            what = f"{len(request.answers)} answers instead of {request.num_answers}"
            yield _of(request, Invariant.ANSWERS, what)
        for answer in request.answers:
            # What came before a client left or a stream broke off is to be right, too.
            if answer != (right if request.complete else right[: len(answer)]):
                what = f"the answer is {_shown(answer)} instead of {_shown(right)}"
                yield _of(request, Invariant.ANSWERS, what)
                break


def _late_requests(history: History) -> Iterator[Violation]:
    for request in history.requests:
        limit_s = allowed_s(request, history)
        took_s = request.ended_s - request.sent_s
        if request.gave_up:
            what = f"no end within {took_s:.0f} s, of {limit_s:.0f} s that are allowed"
        elif took_s > limit_s:
            what = f"it took {took_s:.0f} s, of {limit_s:.0f} s that are allowed"
        else:
            continue
        yield _of(request, Invariant.DEADLINES, what)


def _unserved_probes(history: History) -> Iterator[Violation]:
    for request in history.requests:
        if request.must_answer and not request.answered:
            status = "no status" if request.status is None else f"status {request.status}"
            what = f"{status}: {request.error or 'the answer broke off'}"
            yield _of(request, Invariant.SERVICE, what)


def _pools_not_whole(history: History) -> Iterator[Violation]:
    for lull in history.lulls:
        for engine in lull.engines:
            readings = [
                each
                for each in history.pools
                if each.engine == engine and lull.began_s <= each.at_s <= lull.ended_s
            ]
            if not readings:
                what = "its metrics could not be read in the lull"
            elif not readings[-1].is_whole:
                last = readings[-1]
                what = (
                    f"{last.usage:.0%} of the pool in use, {last.held_blocks:.0f} blocks held, "
                    f"{last.blocks_in_doubt:.0f} in doubt and {last.unfinished:.0f} requests "
                    f"unfinished after {lull.ended_s - lull.began_s:.0f} s without load"
                )
            else:
                continue
            yield Violation(lull.round, lull.ended_s, Invariant.POOLS, engine, what)


def _growth(history: History, bounds: Bounds) -> Iterator[Violation]:
    first: dict[tuple[str, int], Footprint] = {}
    told: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for now in history.footprints:
        key = (now.engine, now.incarnation)
        before = first.setdefault(key, now)
        for name, unit in (("rss_bytes", " bytes"), ("descriptors", ""), ("threads", "")):
            grown = getattr(now, name) - getattr(before, name)
            limit = getattr(bounds, name)
            if grown > limit and name not in told[key]:
                told[key].add(name)
                what = (
                    f"{name} grew from {getattr(before, name):,} by {grown:,}, "
                    f"more than {limit:,}{unit}, in {now.at_s - before.at_s:.0f} s"
                )
                yield Violation(now.round, now.at_s, Invariant.FOOTPRINT, now.engine, what)


def _unwanted_ends(history: History) -> Iterator[Violation]:
    for end in history.ends:
        if not end.wanted:
            how = end.how or "it has ended"
            yield Violation(end.round, end.at_s, Invariant.LIFE, end.engine, how)


def _late_news(history: History) -> Iterator[Violation]:
    strikes = {(each.round, each.label): each for each in history.strikes}
    for request in history.requests:
        strike = strikes.get((request.round, request.label))
        if strike is None or request.ended_s <= strike.at_s + strike.limit_s:
            continue
        took_s = request.ended_s - strike.at_s
        what = f"it ended {took_s:.1f} s later, of {strike.limit_s:g} s that are allowed"
        yield _of(request, Invariant.EARLY, what)


def _of(request: Request, invariant: Invariant, what: str) -> Violation:
    label = f", {request.label}" if request.label else ""
    who = f"{request.manner}{label}, turn {request.turn}"
    at_s = request.ended_s
    return Violation(request.round, at_s, invariant, request.asked, f"{who}: {what}")


def _shown(text: str) -> str:
    more = "" if len(text) <= _SHOWN_CHARACTERS else f"... ({len(text)} tokens)"
    return f"{text[:_SHOWN_CHARACTERS]!r}{more}"
