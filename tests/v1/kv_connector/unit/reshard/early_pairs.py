# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines that requests are sent to at once: schedulers, and workers over real NIXL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from tests.bases import RELEASE
from tests.v1.kv_connector.unit.reshard.engine.workers import fill
from tests.v1.kv_connector.unit.reshard.serving import BLOCK_TOKENS, Whole, until

OPTION = {"early_dispatch": True}
PREFILLED, DECODED = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-bbbbbbbb"
POLICIES = ("fail", "recompute")
LONG_TOKENS, WINDOW_TOKENS = 60, 20
TOLD_WITHIN_S = 1.0
"""So soon a request ends whose prefill engine has ended it, or has ended."""
PATIENCE_S = 60.0


@pytest.fixture
def pair(wholes):
    """Makes a prefill and a decode engine of some layouts, with the option on."""

    def make(
        prefill=None, decode=None, policy="fail", num_replicas=0, drafting="", holds=True, **both
    ):
        layout = {**(prefill or {}), **both, **OPTION}
        both = {**both, **OPTION}
        drafts = drafting == "prefill"
        p = wholes("prefill", layout, num_replicas=num_replicas, drafts=drafts, **both)
        layout = {**(decode or {}), **both}
        d = wholes("decode", layout, policy=policy, drafts=drafting == "decode", **both)
        d.serving.holds = d.serving.holds and holds
        return p, d

    return make


class Clock:
    """What a decode engine goes by: it is a little later at each step, however slow the machine.

    Nothing happens by itself in a time that no step is taken in; what other engines and sockets
    do has five times as long.
    """

    STEP_S = 2e-4

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """How late it is."""
        return self.now_s

    def until(self, condition, *wholes: Whole, within_s: float) -> None:
        """Step engines until something is so, in less than so much of this clock's time."""
        began_s = self.now_s

        def is_so() -> bool:
            self.now_s += self.STEP_S
            assert self.now_s < began_s + within_s
            return condition()

        until(is_so, *wholes)


@pytest.fixture
def clock() -> Clock:
    """A decode engine's clock."""
    return Clock()


def scheduler_of(whole: Whole):
    """The connector's half of an engine's scheduler."""
    return whole.serving.scheduler.connector.connector_scheduler


def is_known(d: Whole) -> bool:
    """Whether a decode engine has heard that the other one knows a request."""
    reads = scheduler_of(d)._reads
    reads.hear()
    return any(each.news is not None for each in reads._reads.values())


def until_claimed(p: Whole, *request_ids: str) -> None:
    """Wait until a decode engine has asked for requests, and is told of them."""
    claimed = scheduler_of(p)._server.publisher.claimed
    until(lambda: claimed.issuperset(request_ids or (PREFILLED,)))


def add_both(p: Whole, d: Whole, **asked) -> Request:
    """Send a request to both engines, and wait until one has asked the other for it."""
    p.serving.add(PREFILLED, {"do_remote_decode": True}, **asked)
    request = d.serving.add(DECODED, coordinates(p), **{"max_tokens": 2, **asked})
    until_claimed(p)
    return request


def coordinates(p: Whole, **changes) -> dict:
    """What vllm-router tells a decode engine of a prefill engine that it takes for a pusher."""
    scheduler = p.serving.scheduler.connector.connector_scheduler
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill",
        "remote_host": "127.0.0.1",
        "remote_port": scheduler.side_channel_port,
        "tp_size": 1,
        "remote_request_id": "x",
        **changes,
    }


def parked(d: Whole, request_id: str = DECODED) -> bool:
    """Whether a request waits without blocks."""
    if request_id in d.serving.held:
        return True
    return d.serving.scheduler.requests[request_id].status is RequestStatus.WAITING


def is_allocated(d: Whole) -> bool:
    """Whether some request has blocks."""
    return d.serving.num_used_blocks() > 0


def is_quiet(*wholes: Whole) -> bool:
    """Whether nothing is left of any request, in schedulers or workers."""
    return all(
        whole.serving.is_through()
        and not len(scheduler_of(whole)._reads)
        and not scheduler_of(whole)._reads._asked
        and not scheduler_of(whole)._prompts._prompts
        and all(
            not len(each.producer) and not len(each.consumer)
            for each in whole.engine.transfer_engines.values()
        )
        for whole in wholes
    )


def assert_ended_by(policy: str, d: Whole) -> None:
    """See that a request that was not read has failed, or was computed, and nothing else."""
    ended = FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH
    assert d.serving.finished == {DECODED: ended}


def begin_chunk(p: Whole, computes=fill) -> Callable[[], dict]:
    """Begin a step that computes some of a prompt, without an end.

    Args:
        p: The prefill engine.
        computes: Writes what it computes.

    Returns:
        Ends it; returns the bytes of the prompt's blocks in the first group, in their order.
    """
    scheduled = p.serving.begin()
    blocks, *_ = p.serving.scheduler.kv_cache_manager.get_block_ids(PREFILLED)
    num_tokens = p.serving.scheduler.requests[PREFILLED].num_prompt_tokens
    heard = p.work(scheduled)

    def end() -> dict:
        whole = computes(p.engine, blocks, num_blocks=-(-num_tokens // BLOCK_TOKENS))
        p.serving.end(scheduled, heard=heard)
        return whole

    return end


def begin_last_chunk(p: Whole, computes=fill) -> Callable[[], dict]:
    """Take all steps that a prompt needs, and begin the last one, without an end."""
    request = p.serving.scheduler.requests[PREFILLED]
    while True:
        end = begin_chunk(p, computes)
        if request.num_computed_tokens >= request.num_prompt_tokens:
            return end
        end()


def compute(p: Whole) -> dict:
    """Take all steps that a prompt needs; returns the bytes of its blocks, in their order."""
    return begin_last_chunk(p)()


def wait_until_known(p: Whole, d: Whole, clock: Clock, *, has_blocks: bool) -> None:
    """Have a decode engine know that its request is known; or be read, as far as it is computed."""
    until_claimed(p)
    if has_blocks:
        begin_last_chunk(p)
        clock.until(lambda: is_allocated(d), d, within_s=PATIENCE_S)
    else:
        p.step()
        clock.until(lambda: is_known(d), d, within_s=PATIENCE_S)


def cut_prompts(p: Whole) -> None:
    """Have the prefill engine compute a block in each step, and tell of it."""
    if RELEASE == "0.22.1":
        pytest.skip("the scheduler of this base does not say which blocks a request has")
    p.serving.scheduler.max_num_scheduled_tokens = BLOCK_TOKENS


LAYOUTS = pytest.mark.parametrize(
    ("prefill", "decode"),
    [({}, {}), ({"tp": 2}, {}), ({"pp": 2}, {"tp": 2})],
    ids=["TP1-TP1", "TP2-TP1", "PP2-TP2"],
)


def prefetch(
    p: Whole, d: Whole, num_chunks: int = 2, num_cached: int = 0, computes=fill
) -> tuple[Callable[[], dict], int]:
    """Compute some chunks of a prompt, of a block each, have them read, and begin the next one.

    Args:
        p: The prefill engine.
        d: The decode engine.
        num_chunks: How many chunks.
        num_cached: How many of these blocks are there already.
        computes: Writes what the chunks compute.

    Returns:
        Ends the next chunk; and how many bytes were read.
    """
    cut_prompts(p)
    add_both(p, d)
    for _ in range(num_chunks):
        begin_chunk(p, computes)()
    wanted = (num_chunks - num_cached) * BLOCK_TOKENS * bytes_of_token(d)
    read = 0

    def is_read() -> bool:
        nonlocal read
        read += bytes_read(d)
        return read >= wanted

    # What a step has computed is told with the next one.
    end = begin_chunk(p)
    until(is_read, d)
    assert read == wanted
    return end, read


def bytes_of_token(whole: Whole) -> int:
    """Bytes of a token in all of an engine's workers."""
    caches = [cache for layers in whole.engine.caches.values() for cache in layers.values()]
    return sum(cache[:, 0].nbytes for cache in caches) // BLOCK_TOKENS


def bytes_read(whole: Whole) -> int:
    """Bytes that an engine has read since the last call."""
    stats = [each.report.take_stats() for each in whole.engine.workers.values()]
    return sum(sum(each.data["bytes_transferred"]) for each in stats if each)
