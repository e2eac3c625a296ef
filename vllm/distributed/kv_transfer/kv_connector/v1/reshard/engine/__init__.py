# SPDX-License-Identifier: Apache-2.0
"""Floor 5: vLLM's side.

compat                      what releases of vLLM do not have in common
geometry, cache_views,
cache_formats, arrangement,
recurrent_state             vLLM's tensors -> planes, and what their bytes mean
ranks                       which rank a worker is, and what the others of its engine hold
ownership, drafts           which layers and heads of the model a worker has, and which are drafts'
factors, releases           vLLM's configuration and release -> what must be equal
settings, stats             what is configured, what is counted
metadata                    what scheduler and workers send each other
failed_reads                how a request ends whose blocks may still be written
connector_thread,
transfer_engine             the connector's thread, and what it polls
devices                     which device threads work with, and what it has still to do
stalls                      threads that do not come round
handovers                   from an offer to the first token
idling                      when the engine's core takes no steps
dialer, plans               what takes long of a connection with another engine
peers                       the engines that are known, and how they are connected
early, watched_engine,
watched_requests            requests that are not offered yet
abandoned_reads             looks for them that are not wanted any more
prefetch, prefetcher        what of them is read while their prompts are computed
consumer, readings          requests that are read, and what each goes through
lease_checks, completions,
doubt                       what follows a read, and its end
producer                    requests that are held for others
pcp_replica                 workers whose caches others serve
queues                      how a poll works through what waits for it
traces                      what they go through, in their clients' traces
receives                    what is to be read for a request
readers                     which request reads what is offered, and which gives it up
offers, board_updates       what is held, or being computed, on its way from scheduler to workers
parking                     requests that the scheduler gives no blocks yet
first_tokens                answers that begin with the token that the prefill engine has sampled
notifier, renewals          what producers are told, and the leases that are renewed
token_counts                how much of a request is read, held and offered
content                     what a prompt's KV depends on
worker, scheduler           the two halves of the connector

`docs/architecture.md` shows the threads and the life of a request.
"""
