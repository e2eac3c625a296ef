# SPDX-License-Identifier: Apache-2.0
"""Floor 5: vLLM's side.

compat                      what releases of vLLM do not have in common
geometry, cache_views,
attention_backends, state   vLLM's tensors -> planes
ownership, drafts           which layers and heads of the model a worker has, and which are drafts'
factors                     vLLM's configuration -> what must be equal
settings, stats             what is configured, what is counted
envelopes                   what scheduler and workers send each other
failed_reads                how a request ends whose blocks may still be written
loop, transfer engine              the connector's thread, and what it does in each turn
peers, opening              engines that are known, and how they are connected
reads, producer               requests that are read, and what is held for others
offers                      what is held, on its way from scheduler to workers
notifier, heartbeats        what they are told
content, digests            what a prompt's KV depends on, hashed while it is computed
worker, scheduler           the two halves of the connector
"""
