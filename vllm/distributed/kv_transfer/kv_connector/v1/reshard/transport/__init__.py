# SPDX-License-Identifier: Apache-2.0
"""Floor 4: agents, sockets and device memory. Knows NIXL, ZeroMQ and torch, not vLLM's engine.

agent                       NIXL
side_channel                answers other engines' handshakes
handshake_client, resolver  asks other engines, and resolves their hosts' names
agent_metadata              names and room of NIXL metadata, before NIXL has them
probe, probe_process        try other engines' NIXL metadata in a process that may end over it
zmtp                        bounds what comes over a ZeroMQ connection
authentication              the key that engines know one another by
announcements               what an engine's scheduler tells its workers between two steps
doorbell                    how workers wake a scheduler that takes no steps
sockets                     how one listens, and what the two above send and receive with
limits                      of open files, threads and ports, and other hosts' shares of them
cpu                         what is for engines on CPU only
lane                        the agents that peers share
connection, remote          a connection with an engine over a lane, and what is read over it
transfers, budget           reads in flight, and for how long a poll looks after them
staging_area, scatter       the arena's memory, and copies out of it
lease_check                 whether what was read was still held
board_reader                what is said of requests that are not offered yet
row_buffer                  where the rows land that both of them read

`docs/architecture.md` shows which thread owns what here, and all deadlines.
"""
