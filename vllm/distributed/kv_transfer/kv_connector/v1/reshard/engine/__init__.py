# SPDX-License-Identifier: Apache-2.0
"""Floor 5: vLLM's side.

geometry, factors           vLLM's tensors and configuration -> values
settings, stats             what is configured, what is counted
envelopes                   what scheduler and workers send each other
peers, holder               engines that are known, and what is held for them
notifier, heartbeats        what they are told
worker, scheduler           the two halves of the connector
"""
