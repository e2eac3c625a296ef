# SPDX-License-Identifier: Apache-2.0
"""What a scheduler says of the requests that it computes."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.board_updates import (
    BoardUpdates,
    Scheduled,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.board import (
    BoardUpdate,
    Record,
    State,
    digest_of,
    read_record,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    decode_announcement,
    encode_announcement,
)


@dataclass
class Prompt:
    """A prompt that a scheduler computes.

    Attributes:
        num_prompt_tokens: How long it is.
        num_computed_tokens: How many of its tokens are computed after what is scheduled.
        num_in_flight: How many of these are those of steps that are not over.
    """

    num_prompt_tokens: int = 40
    num_computed_tokens: int = 0
    num_in_flight: int = 0


def made(*block_tokens: int) -> tuple[BoardUpdates, list]:
    """Updates of a scheduler with blocks of these sizes, and what they announce."""
    announced: list = []
    return BoardUpdates(
        lambda update: announced.append(decode_announcement(encode_announcement(update))),
        block_tokens,
        lambda prompt: prompt.num_in_flight,
    ), announced


def step(
    num_before: int, num_after: int, *block_ids: list[int], request_id: str = "a"
) -> Scheduled:
    """A request in a step, which begins it where nothing was computed before."""
    return Scheduled(request_id, num_before, num_after, block_ids, begins=not num_before)


def told(update: BoardUpdate) -> tuple[State | None, int, list[list[int]]]:
    """What a update tells of a prompt: its state, tokens that are computed, and their blocks."""
    record = read_record(update.record, digest_of(update.record))
    assert isinstance(record, Record) and record.num_tokens == update.num_computed
    return update.state, update.num_computed, record.blocks()


def states(updates: BoardUpdates) -> list[tuple[str, State | None]]:
    """What a step tells."""
    return [(each.name, each.state) for each in updates.take()]


def complete(updates: BoardUpdates, request_id: str) -> None:
    """Compute a request's prompt, in two steps."""
    updates.note_blocks(request_id, Prompt())
    updates.compute([step(0, 99, request_id="another"), step(0, 32, [5, 2], request_id=request_id)])
    updates.compute([step(32, 40, [9], request_id=request_id)])
    updates.compute([step(40, 41, request_id=request_id)])


def test_request_is_known_computed_and_offered():
    """Each is announced, and told by the next step once; of its steps the last is."""
    updates, announced = made()
    updates.add("a", "x")
    complete(updates, "a")
    updates.offer("a", 40, [[5, 2, 9]])
    taken = updates.take()
    assert taken == announced and updates.take() == []
    assert [each.state for each in taken] == [State.KNOWN, State.LAST_CHUNK, State.OFFERED]
    assert [each.number for each in taken] == [1, 2, 3]
    updates.forget(["a"])
    assert states(updates) == [] and not len(updates)


def test_requests_that_nobody_waits_for_are_not_told_of():
    """As those of clients that ask this engine alone."""
    updates, announced = made()
    complete(updates, "a")
    updates.finish("a", State.ABORTED)
    updates.forget(["a"])
    assert not announced


def test_two_requests_of_one_name_are_ambiguous_until_both_have_ended():
    """Nobody could say which is meant, also once one of them has ended."""
    updates, _ = made()
    for request_id in ("a", "b"):
        updates.add(request_id, "x")
    complete(updates, "a")
    updates.offer("a", 40, [[1]])
    updates.finish("b", State.ABORTED)
    assert states(updates) == [("x", State.KNOWN), ("x", State.AMBIGUOUS)]
    updates.forget(["a"])
    assert states(updates) == [("x", None)]
    updates.add("c", "x")
    assert states(updates) == [("x", State.KNOWN)]


def begin(prompt: Prompt, *block_tokens: int) -> BoardUpdates:
    """The updates of a scheduler that computes 16 tokens of a prompt in its first step."""
    updates, _ = made(*block_tokens)
    updates.add("a", "x")
    updates.note_blocks("a", prompt)
    updates.compute([step(0, 16, [5], [7])])
    prompt.num_computed_tokens = prompt.num_in_flight = 16
    assert [each.record for each in updates.take()] == [b""]
    return updates


def test_prompt_is_told_of_as_its_steps_are_over():
    """Full blocks, of groups that keep all tokens; the step that is scheduled is not over."""
    prompt = Prompt(num_prompt_tokens=80)
    updates = begin(prompt, 16, 0)
    prompt.num_in_flight = 0
    updates.compute([step(16, 40, [2, 9], [8])])
    prompt.num_computed_tokens = 40
    updates.compute([step(40, 80, [3, 4], [])])
    assert [told(each) for each in updates.take() if each.record] == [
        (State.KNOWN, 16, [[5], []]),
        (State.LAST_CHUNK, 40, [[5, 2], []]),
    ]
    # No more of it is computed since.
    updates.compute([])
    assert not updates.take()


def test_steps_that_are_ahead_are_not_over():
    """With asynchronous scheduling the next step is scheduled while one is computed."""
    prompt = Prompt(num_prompt_tokens=80)
    updates = begin(prompt, 16, 0)
    updates.compute([step(16, 40, [2, 9], [8])])
    prompt.num_computed_tokens, prompt.num_in_flight = 40, 24
    assert not updates.take()
    updates.compute([step(40, 56, [3], [])])
    prompt.num_computed_tokens, prompt.num_in_flight = 56, 16
    updates.compute([step(56, 80, [4, 6], [])])
    taken = updates.take()
    assert [told(each) for each in taken if each.record] == [
        (State.KNOWN, 16, [[5], []]),
        (State.LAST_CHUNK, 40, [[5, 2], []]),
    ]


def test_what_was_cached_is_told_of_once_a_step_is_over():
    """The request that computes it may be in the very same step."""
    prompt = Prompt(num_prompt_tokens=80)
    updates, _ = made(16)
    updates.add("a", "x")
    updates.note_blocks("a", prompt)
    # Nor what is to be received from another engine, before it is in any step.
    prompt.num_computed_tokens = 32
    updates.compute([])
    updates.compute([Scheduled("a", 32, 48, [[5, 2, 9]], begins=True)])
    prompt.num_computed_tokens, prompt.num_in_flight = 48, 16
    updates.compute([Scheduled("a", 48, 64, [[3]], begins=False)])
    assert [each.record for each in updates.take()] == [b""]
    prompt.num_computed_tokens, prompt.num_in_flight = 64, 16
    updates.compute([])
    assert [told(each) for each in updates.take()] == [(State.KNOWN, 48, [[5, 2, 9]])]


def test_prompt_that_is_preempted_is_another_attempt():
    """Its blocks are others' meanwhile; what it has then is told of with its offer, too."""
    prompt = Prompt(num_prompt_tokens=80)
    updates = begin(prompt, 16, 16)
    prompt.num_in_flight = 0
    updates.compute([step(16, 32, [2], [8])])
    prompt.num_computed_tokens = 0
    updates.compute([])
    updates.compute([step(0, 48, [1, 3, 6], [4, 9, 0])])
    prompt.num_computed_tokens = 48
    updates.compute([step(48, 80, [10, 11], [12, 13])])
    updates.offer("a", 80, [[1, 3, 6, 10, 11], []])
    records = [read_record(each.record, digest_of(each.record)) for each in updates.take()]
    told_of = [each for each in records if isinstance(each, Record)]
    assert [each.blocks()[0] for each in told_of] == [[5], [1, 3, 6], [1, 3, 6, 10, 11]]
    first, second, offered = (each.attempt for each in told_of)
    assert first != second == offered


def test_prompt_that_is_preempted_in_its_last_step_needs_blocks_again():
    """Nobody is to hold blocks for it until its last chunk is scheduled once more."""
    prompt = Prompt(num_prompt_tokens=32)
    updates = begin(prompt, 16, 0)
    prompt.num_in_flight = 0
    updates.compute([step(16, 32, [2], [8])])
    prompt.num_computed_tokens = 0
    updates.compute([step(0, 16, [3], [9])])
    prompt.num_computed_tokens = 16
    updates.compute([step(16, 32, [4], [])])
    stages = [each.state for each in updates.take() if not each.record]
    assert stages == [State.LAST_CHUNK, State.KNOWN, State.LAST_CHUNK]


def test_nothing_is_told_beyond_the_prompt():
    """As where a prefill engine is asked for more than one token."""
    prompt = Prompt(num_prompt_tokens=40)
    updates = begin(prompt, 16, 0)
    updates.compute([step(16, 40, [2, 9], [])])
    updates.take()
    told_of = []
    for num_tokens in range(40, 60):
        prompt.num_computed_tokens, prompt.num_in_flight = num_tokens, 0
        updates.compute([step(num_tokens, num_tokens + 1)])
        told_of += [each.num_computed for each in updates.take()]
    assert told_of == [40]


def test_nothing_is_told_of_what_is_ambiguous():
    """Nobody could say which of them is computed."""
    prompt = Prompt(num_prompt_tokens=80)
    updates = begin(prompt, 16, 0)
    updates.add("b", "x")
    prompt.num_in_flight = 0
    updates.compute([step(16, 32, [2], [8])])
    assert [each.state for each in updates.take()] == [State.AMBIGUOUS]


def test_scheduler_that_cannot_tell_what_is_in_flight_tells_nothing():
    """Of what is computed so far; all else it does."""
    prompt = Prompt(num_prompt_tokens=80)
    announced: list = []
    updates = BoardUpdates(announced.append, (16,), lambda _: None)
    updates.add("a", "x")
    updates.note_blocks("a", prompt)
    for number in range(5):
        updates.compute([step(16 * number, 16 * (number + 1), [number])])
        prompt.num_computed_tokens = 16 * (number + 1)
    assert [each.state for each in announced] == [State.KNOWN, State.LAST_CHUNK]
