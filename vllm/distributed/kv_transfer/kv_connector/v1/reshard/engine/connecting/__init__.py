# SPDX-License-Identifier: Apache-2.0
"""The engines that a worker knows.

peers                       their table: when to connect, to retry, to forget
dialer                      what takes long of a connection: handshakes, plans, agents
"""
