# SPDX-License-Identifier: Apache-2.0
"""How long a connection lives."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import (
    PEER_GRACE_S,
    Lifetime,
)

HUNG_GRACE_S = 600.0


def test_open_connection_is_never_closed():
    """Whatever is in flight or in doubt: it is retired before."""
    lifetime = Lifetime(HUNG_GRACE_S)
    lifetime.begin()
    lifetime.fail(1.0)
    assert not lifetime.is_retired and lifetime.close_at_s() is None


def test_retired_connection_ends_when_everything_is_done():
    """It is waited for without a limit that a live peer would meet."""
    lifetime = Lifetime(HUNG_GRACE_S)
    lifetime.begin()
    lifetime.retire(10.0)
    lifetime.retire(20.0)
    assert lifetime.close_at_s() == 10.0 + HUNG_GRACE_S
    lifetime.done()
    assert lifetime.is_drained
    assert lifetime.close_at_s() == 10.0
    assert lifetime.close_at_s(wanted=True) == 10.0 + HUNG_GRACE_S


def test_after_a_failure_the_others_are_given_a_moment():
    """A lost connection fails all of them; what is in doubt is quiet when it has ended."""
    lifetime = Lifetime(HUNG_GRACE_S)
    lifetime.begin()
    lifetime.begin()
    lifetime.fail(10.0)
    lifetime.retire(12.0)
    assert lifetime.close_at_s() == 12.0 + PEER_GRACE_S
    lifetime.fail(13.0)
    assert lifetime.close_at_s() == 12.0 and not lifetime.is_drained
    lifetime.close()
    assert lifetime.is_drained


def test_grace_of_the_others_ends_with_that_of_hung_ones():
    """Whichever is over first."""
    lifetime = Lifetime(PEER_GRACE_S / 2)
    lifetime.begin()
    lifetime.refuse(10.0)
    lifetime.retire(10.0)
    assert lifetime.close_at_s() == 10.0 + PEER_GRACE_S / 2


def test_requests_keep_a_connection():
    """What they have read may have landed, and is still to be looked up."""
    lifetime = Lifetime(HUNG_GRACE_S)
    lifetime.begin_request()
    lifetime.begin_request()
    lifetime.retire(10.0)
    assert not lifetime.is_drained and lifetime.close_at_s() == 10.0 + HUNG_GRACE_S
    lifetime.end_request()
    assert lifetime.close_at_s() == 10.0 + HUNG_GRACE_S
    lifetime.end_request()
    assert lifetime.is_drained and lifetime.close_at_s() == 10.0


def test_request_ends_once_however_often_that_is_said():
    """One that has failed may end with its lane after that."""
    lifetime = Lifetime(HUNG_GRACE_S)
    lifetime.begin_request()
    lifetime.close()
    lifetime.end_request()
    assert lifetime.requests == 0 and lifetime.is_drained


def test_what_is_in_doubt_alone_is_not_waited_for():
    """Only the end of its lane makes it drained."""
    lifetime = Lifetime(HUNG_GRACE_S)
    lifetime.begin()
    lifetime.fail(10.0)
    lifetime.retire(10.0)
    assert lifetime.close_at_s() == 10.0 and not lifetime.is_drained
    lifetime.close()
    assert lifetime.is_drained


def test_refused_read_is_in_doubt():
    """NIXL had begun with it."""
    lifetime = Lifetime(HUNG_GRACE_S)
    lifetime.refuse(1.0)
    assert not lifetime.is_drained and lifetime.in_flight == 0


class LifetimeMachine(RuleBasedStateMachine):
    """Any order of events: quiet is only what is done, or what has ended with its agent."""

    def __init__(self) -> None:
        super().__init__()
        self.lifetime = Lifetime(HUNG_GRACE_S)
        self.now_s = 0.0
        self.writing = self.requests = 0
        self.closed = False

    @precondition(lambda self: not self.closed)
    @rule()
    def begin(self):
        """Post a read."""
        self.lifetime.begin()
        self.writing += 1

    @precondition(lambda self: not self.closed)
    @rule()
    def begin_request(self):
        """Read a request."""
        self.lifetime.begin_request()
        self.requests += 1

    @precondition(lambda self: self.requests)
    @rule()
    def end_request(self):
        """It was received, or has failed."""
        self.lifetime.end_request()
        self.requests -= 1

    @precondition(lambda self: self.lifetime.in_flight)
    @rule(well=st.booleans())
    def end(self, well):
        """NIXL says that a read has ended; it writes on unless it is done."""
        if well:
            self.lifetime.done()
            self.writing -= 1
        else:
            self.lifetime.fail(self.now_s)

    @precondition(lambda self: not self.closed)
    @rule()
    def retire(self):
        """Something is wrong, with it or with another one of its lane."""
        self.lifetime.retire(self.now_s)

    @rule(seconds=st.floats(0, 1000))
    def wait(self, seconds):
        """Time passes; what is due is closed."""
        self.now_s += seconds
        at_s = self.lifetime.close_at_s()
        if at_s is not None and at_s <= self.now_s and not self.closed:
            self.lifetime.close()
            self.closed, self.writing, self.requests = True, 0, 0

    @invariant()
    def quiet_is_quiet(self):
        """Nothing writes while it is taken for quiet, and it ends within the longest grace."""
        assert self.lifetime.is_drained == (self.writing == self.requests == 0)
        if self.lifetime.retired_at_s is not None:
            assert self.lifetime.close_at_s() <= self.lifetime.retired_at_s + HUNG_GRACE_S


TestAnyOrderOfEvents = LifetimeMachine.TestCase
