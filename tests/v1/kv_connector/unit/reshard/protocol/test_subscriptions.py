# SPDX-License-Identifier: Apache-2.0
"""What decode engines ask prefill engines, and what they are told."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import subscriptions
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.subscriptions import (
    FORGET_AFTER_S,
    KNOWN_WITHIN_S,
    Ask,
    Computed,
    Gone,
    Hello,
    Known,
    Leave,
    Offered,
    Publisher,
    decode_answer,
    decode_questions,
    encode_hello,
    encode_news,
    encode_questions,
)

PART = Computed("", "p", "10.0.0.1", 5600, "r", 0, 4, 8, [[1], []])


def told(publisher: Publisher) -> list:
    """The news since the last call, of all connections."""
    return [each for news in publisher.take().values() for each in news]


def test_messages_are_understood_as_they_were_meant():
    """Questions, the greeting, and news, in as many messages as these need."""
    questions = [Ask("a", "x", 1 << 63), Leave("b", "y"), Leave("c", "", 7)]
    assert decode_questions(encode_questions(questions)) == questions
    assert decode_answer(encode_hello("engine")) == Hello("engine")
    news = [Known("a"), PART, Offered("c", {"n": None}, 2), Gone("d", "why")] * 3000
    messages = list(encode_news(news))
    assert len(messages) > 1
    assert [each for message in messages for each in decode_answer(message)] == news


@given(st.binary(max_size=60))
def test_whatever_comes_is_understood_or_nothing(data):
    """Nothing is raised."""
    decode_questions(data)
    decode_answer(data)


def test_life_of_a_request():
    """Who asks at its beginning hears of all of it; who asks late, of its state."""
    publisher = Publisher()
    publisher.ask(b"d", Ask("a", "x", 7), 0.0)
    assert not told(publisher)
    publisher.add("r", "x", 7)
    assert told(publisher) == [Known("a")] and publisher.claimed == {"r"}
    publisher.compute("r", PART)
    (part,) = told(publisher)
    assert part.asker == "a" and part.block_ids == [[1], []]
    publisher.offer("r", {"blocks": 1}, 3)
    assert told(publisher) == [Offered("a", {"blocks": 1}, 3)]
    publisher.ask(b"another connection", Ask("a", "x", 7), 1.0)
    assert publisher.take() == {b"another connection": [Offered("a", {"blocks": 1}, 3)]}
    publisher.end("r", "it was read")
    assert not told(publisher) and not len(publisher) and not publisher.num_subscribers


def test_requests_are_told_apart_by_name_and_prompt():
    """A name that is used again, and prompts without a name that both engines have."""
    publisher = Publisher()
    publisher.add("r1", "x", 1)
    publisher.add("r2", "x", 2)
    publisher.add("r3", "resp", 3)
    publisher.ask(b"d", Ask("a", "x", 2), 0.0)
    publisher.ask(b"d", Ask("b", "x", 1), 0.0)
    publisher.ask(b"d", Ask("c", "", 3), 0.0)
    publisher.ask(b"d", Ask("d", "x", 1), 0.0)
    assert sorted(each.asker for each in told(publisher)) == ["a", "b", "c"]
    for number in (1, 2, 3):
        publisher.offer(f"r{number}", {"of": number}, 0)
    assert {each.asker: each.params["of"] for each in told(publisher)} == {"b": 1, "a": 2, "c": 3}


def test_who_leaves_gives_up_one_attempt():
    """The next one of its name and prompt is another's."""
    publisher = Publisher()
    publisher.add("r1", "x", 1)
    publisher.ask(b"d", Ask("a", "x", 1), 0.0)
    publisher.add("r2", "x", 1)
    publisher.ask(b"d", Leave("a", "x", 1), 0.0)
    publisher.ask(b"d", Ask("b", "x", 1), 0.0)
    assert told(publisher)[-1] == Known("b")
    assert publisher.given_up == {"r1"} and publisher.claimed == {"r2"}
    publisher.compute("r1", PART)
    assert not told(publisher)
    publisher.end("r1", "nobody reads it")
    assert told(publisher) == [Gone("a", "nobody reads it")]
    assert not publisher.given_up and publisher.num_subscribers == 1


def test_request_that_was_offered_before_its_scheduler_saw_that_it_is_left():
    """Whoever has left gives it up once more, instead of its lease."""
    publisher = Publisher()
    publisher.add("r1", "x", 1)
    publisher.ask(b"d", Ask("a", "x", 1), 0.0)
    publisher.ask(b"d", Leave("a", "x", 1), 0.0)
    told(publisher)
    publisher.offer("r1", {"secret": 1}, 0)
    assert told(publisher) == [Offered("a", {"secret": 1}, 0)]
    assert not publisher.given_up and not publisher.claimed


def test_request_that_was_left_may_be_anothers():
    """If it is asked for before it has ended."""
    publisher = Publisher()
    publisher.add("r1", "x", 1)
    publisher.ask(b"d", Leave("a", "x", 1), 0.0)
    publisher.ask(b"d", Ask("b", "x", 1), 0.0)
    assert told(publisher) == [Gone("a", "another request reads it"), Known("b")]
    assert not publisher.given_up and publisher.claimed == {"r1"}


def test_who_leaves_before_it_has_asked_gives_up_no_later_attempt():
    """As where there was no connection yet; a request that was refused has no digest, and waits."""
    publisher = Publisher()
    publisher.ask(b"d", Leave("a", "x", 1), 0.0)
    publisher.ask(b"d", Leave("b", "y"), 0.0)
    publisher.add("r1", "x", 1)
    publisher.add("r2", "y", 2)
    publisher.ask(b"d", Ask("c", "x", 1), 0.0)
    assert told(publisher) == [
        Gone("a", "it is not known there"),
        Known("c"),
    ]
    assert publisher.given_up == {"r2"}
    publisher.end("r2", "nobody reads it")
    assert told(publisher) == [Gone("b", "nobody reads it")]


def test_offer_that_is_left_is_told_of_once_more():
    """With what gives it up."""
    publisher = Publisher()
    publisher.add("r", "x", 1)
    publisher.offer("r", {"secret": 1}, 0)
    publisher.ask(b"d", Leave("a", "x"), 0.0)
    assert told(publisher) == [Offered("a", {"secret": 1}, 0)] and not publisher.given_up


def test_request_that_was_not_sent_here_is_told_of_in_time():
    """In which the scheduler has come round: a step that takes long is no reason."""
    publisher = Publisher()
    publisher.add("r", "y", 2)
    publisher.ask(b"d", Ask("a", "x", 1), 0.0)
    publisher.ask(b"d", Ask("b", "y", 1), 0.0)
    publisher.expire(2 * KNOWN_WITHIN_S, KNOWN_WITHIN_S / 2)
    assert not told(publisher)
    publisher.expire(2 * KNOWN_WITHIN_S, KNOWN_WITHIN_S)
    first, second = told(publisher)
    assert "not known there" in first.reason and "another prompt" in second.reason


def test_forgotten_subscriptions_free_their_requests():
    """Unless they were offered: somebody may be reading."""
    publisher = Publisher()
    for name in ("r1", "r2"):
        publisher.add(name, name, 1)
        publisher.ask(b"d", Ask(f"a {name}", name, 1), 0.0)
    publisher.offer("r2", {}, 0)
    told(publisher)
    publisher.expire(FORGET_AFTER_S, FORGET_AFTER_S)
    publisher.ask(b"e", Ask("b", "r1", 1), FORGET_AFTER_S)
    publisher.ask(b"e", Ask("c", "r2", 1), FORGET_AFTER_S)
    assert told(publisher) == [Known("b")]


def test_subscribers_are_bounded(monkeypatch):
    """A further one is told so."""
    monkeypatch.setattr(subscriptions, "MAX_SUBSCRIBERS", 2)
    publisher = Publisher()
    for number in range(3):
        publisher.ask(b"d", Ask(str(number), "x", number), 0.0)
    (gone,) = told(publisher)
    assert gone.asker == "2" and publisher.num_subscribers == 2


NAMES, CONTENTS = st.sampled_from(["", "x", "y"]), st.integers(0, 1)
EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 3), st.sampled_from(["x", "y"]), CONTENTS),
    st.tuples(st.just("offer"), st.integers(0, 3)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("ask"), st.integers(0, 3), NAMES, CONTENTS),
    st.tuples(st.just("leave"), st.integers(0, 3), NAMES),
    st.tuples(st.just("expire"), st.sampled_from([1.0, 11.0, 50.0])),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=30))
def test_nobody_is_told_of_anothers_request(events):
    """An offer goes to one asker, whose prompt it is; and nothing is left at the end."""
    publisher, now_s = Publisher(), 0.0
    asked: dict[str, tuple[str, int | None]] = {}
    prompts: dict[str, tuple[str, int]] = {}
    offered_to: dict[int, str] = {}
    for number, (kind, *of) in enumerate(events):
        if kind == "add":
            publisher.end(f"r{of[0]}", "anew")
            prompts[f"r{of[0]}"] = of[1], of[2]
            publisher.add(f"r{of[0]}", of[1], of[2])
        elif kind == "offer" and f"r{of[0]}" in prompts:
            name = f"r{of[0]}"
            publisher.offer(name, {"number": number, "of": prompts.pop(name)}, 0)
        elif kind == "end":
            prompts.pop(f"r{of[0]}", None)
            publisher.end(f"r{of[0]}", "over")
        elif kind == "ask":
            asked[f"a{number}"] = of[1], of[2]
            publisher.ask(b"d%d" % of[0], Ask(f"a{number}", of[1], of[2]), now_s)
        elif kind == "leave":
            asked[f"a{number}"] = of[1], None
            publisher.ask(b"d%d" % of[0], Leave(f"a{number}", of[1]), now_s)
        elif kind == "expire":
            now_s += of[0]
            publisher.expire(now_s, now_s)
        for each in told(publisher):
            if isinstance(each, Offered):
                name, content = asked[each.asker]
                known_as, of_prompt = each.params["of"]
                assert name in ("", known_as) and content in (None, of_prompt)
                assert offered_to.setdefault(each.params["number"], each.asker) == each.asker
    for number in range(4):
        publisher.end(f"r{number}", "over")
    publisher.expire(now_s + FORGET_AFTER_S, now_s + FORGET_AFTER_S)
    assert not len(publisher) and not publisher.num_subscribers
    assert not publisher.claimed and not publisher.given_up and not publisher._waiting
