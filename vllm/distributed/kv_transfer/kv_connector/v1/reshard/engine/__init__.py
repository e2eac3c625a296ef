# SPDX-License-Identifier: Apache-2.0
"""Floor 5: vLLM's side.

scheduling                  the scheduler's half of the connector, in the engine core's process
worker                      the worker's half, which the engine's thread calls
connector_thread,
transfer_engine             the connector's thread in a worker, and what it polls
caches                      what a worker's KV caches hold, and what their bytes mean
connecting                  other engines: handshakes, connections, back-off
reading                     requests that this engine reads
producer                    requests that this worker holds for others
pcp_replica                 workers whose caches others serve
failed_reads                what both halves do when blocks cannot be read
metadata                    what scheduler and workers send each other
content, weights            what the KV of a prompt depends on
settings                    options
stats, traces               metrics and spans
stalls                      warnings about threads that stand still
compat                      what releases of vLLM do not have in common, and what means otherwise

`docs/architecture.md` shows the threads and the life of a request.
"""
