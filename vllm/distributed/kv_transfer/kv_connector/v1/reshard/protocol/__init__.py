# SPDX-License-Identifier: Apache-2.0
"""Floor 3: bytes and state machines. No socket, no clock.

ids                         what requests, engines and blocks are called
ledgers                     what a prefill worker holds for readers
states                      where a request is, and what may follow
tasks                       functions that wait, and how a thread steps them
lifetimes                   how long a connection must stay
fingerprint                 what stands for tokens and blocks that are offered
packing                     which windows a worker packs for readers, and where
leases                      which requests a worker holds, where readers can see it
early, subscriptions        requests that go to both engines at once: names, and how one waits
metadata, description       what engines tell each other when they shake hands
compatibility               what they must have in common: a version, and what bytes mean
bounds                      what that may cost, and which hosts may be asked
messages                    what travels afterwards
params                      what requests ask for
request_blocks              which of a request's blocks are read
"""
