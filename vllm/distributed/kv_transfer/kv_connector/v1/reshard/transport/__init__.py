# SPDX-License-Identifier: Apache-2.0
"""Floor 4: agents, sockets and device memory. Knows NIXL, ZeroMQ and torch, not vLLM's engine.

agent                       NIXL
side_channel                answers other engines' handshakes
handshake_client, resolver  asks other engines, and resolves their hosts' names
subscriber                  asks other engines for requests that they compute
agent_metadata              names and room of NIXL metadata, before NIXL has them
probe, probe_process        try other engines' NIXL metadata in a process that may end over it
zmtp                        bounds what comes over a ZeroMQ connection
authentication              the key that engines know one another by
announcements               what an engine's scheduler tells its workers between two steps
limits                      of open files, threads and ports, and other hosts' shares of them
cpu                         what is for engines on CPU only
lane                        the agents that peers share
connection, remote          a connection with an engine over a lane, and what is read over it
parts                       what each part of a request reads, and how
transfers, budget           reads in flight, and for how long a poll looks after them
arena                       a reader's arena, and copies between an arena and the cache
pack_area, packed_windows   a holder's arena, and its windows as their reader sees them
lease_check                 whether what was read was still held

`docs/architecture.md` shows which thread owns what here, and all deadlines.
"""
