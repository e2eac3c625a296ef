# SPDX-License-Identifier: Apache-2.0
"""Floor 5: vLLM's side.

compat                      what releases of vLLM do not have in common
geometry, cache_views,
attention_backends          vLLM's tensors -> planes
ownership, drafts           which layers and heads of the model a worker has, and which are drafts'
factors                     vLLM's configuration -> what must be equal
settings, stats             what is configured, what is counted
envelopes                   what scheduler and workers send each other
peers, holder               engines that are known, and what is held for them
notifier, heartbeats        what they are told
worker, scheduler           the two halves of the connector
"""
