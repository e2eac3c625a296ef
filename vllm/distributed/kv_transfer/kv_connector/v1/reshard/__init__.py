# SPDX-License-Identifier: Apache-2.0
"""KV-cache transfer between engines of any two tensor- and pipeline-parallel layouts.

A rank owns a box, layers x global KV heads. A destination rank needs its own box filled: intersect
it with the source ranks' boxes, elect one holder where several hold the same heads, and the result
is a list of reads. Data flows one way through the modules.

The core computes with values alone; it imports neither vLLM nor torch:

    mesh, shards    who holds what
    plan, verify    who reads what from whom and who releases whom, and a check by other means
    cache, lowering where the bytes lie, and how reads become descriptors and indices
    summary         what a plan costs, and how it is told to people
    protocol        what each side knows of its requests
    leases          which requests a worker holds, where readers can see it

The shell around it talks to the world:

    settings, params                what engines are configured to do, and what requests ask for
    geometry                        tensors -> cache
    compatibility, metadata         what engines tell each other when they shake hands
    side_channel                    how it travels
    agent                           NIXL
    messages                        what travels afterwards
    remote, peers                   engines that are connected
    holder, lease_check             what is held for them, and whether they held what was read
    stats                           what is counted
    worker, scheduler, connector    vLLM's side
"""
