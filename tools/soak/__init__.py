# SPDX-License-Identifier: Apache-2.0
"""Chaos with invariants: prefill and decode engines under load, a nemesis, and a checker.

``make soak`` runs it. What decides is apart from what acts:

    values and plans    workload, faults, schedule, forgery    from a seed, without any I/O
    what acts           fleet, clients, frames, nemesis,       engines, clients, signals, sockets
                        early, observer
    what it leaves      history                                everything that was seen, in seconds
    what judges         checker                                a function of the history

``runner`` puts them together, ``report``, ``excerpts`` and ``plot`` show what came of it.
"""
