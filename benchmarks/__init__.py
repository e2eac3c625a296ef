# SPDX-License-Identifier: Apache-2.0
"""Ours and upstream's connector of the same wheel, measured side by side.

    python -m benchmarks [--quick | --full] [--only PART] [--output DIR]

What is compared is a *variant*: our connector, upstream's as it ships, upstream's with NIXL's
threads at rest and on all cores, raw NIXL, memcpy. Every variant has processes of its own, one for
each rank, with real NIXL and real registered memory; there is no model. They are driven through the
methods of `KVConnectorBase_V1`, the scheduler's side included, so that nothing here knows what a
connector tells its workers. Variants take turns, and those whose turn it is not are stopped
(SIGSTOP): threads that spin in one take nothing from another.

What runs in this process, without vLLM:

    cases, tables       what is measured
    samples, targets    what the figures say
    children, variants     the processes
    handshake, transfer, request_path, end_to_end, clients
    report, plot, machine, cli

What runs in the ranks:

    host, config, caches, raw
"""
