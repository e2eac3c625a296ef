# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the connector. All of it belongs to the scheduler's thread.

scheduler                   vLLM's calls
receives                    which of a request's parameters count, and what workers read for it
readers                     which request reads an offer, and which gives it up
awaiting                    requests whose leases workers renew
parking                     requests that get no blocks yet
offers, board_updates       what is held, or being computed, on its way to the workers
first_tokens                answers that begin with the token that the prefill engine sampled
token_counts                how many tokens of a request are read, held and offered
idling                      when the engine's core takes no steps
"""
