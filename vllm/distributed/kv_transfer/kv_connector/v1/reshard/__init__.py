# SPDX-License-Identifier: Apache-2.0
"""KV-cache transfer between engines of any two tensor- and pipeline-parallel layouts.

A rank owns a box, layers x global KV heads. A destination rank needs its own box filled: intersect
it with the source ranks' boxes, elect one holder where several hold the same heads, and the result
is a list of reads. The code stands on five floors, and imports go down only:

    connector       the facade that vLLM constructs
    engine          5   vLLM's side: worker and scheduler
    transport       4   NIXL, ZeroMQ, torch
    protocol        3   what engines say to each other, and what each knows of its requests
    memory          2   where bytes lie, and how reads become descriptors
    plan            1   which rank holds what, and which reads what from which
    errors          the ground: errors, and names in their text

    cli             `kv-plan`, a program of its own beside floors 4 and 5
    dry_run         a process that it asks, on top of all floors

Floors 1 to 3 compute with values alone: they import neither vLLM nor torch, and do no I/O; `make
lint` holds them to that. Imports within the package are relative, as `kv-plan` loads it under
another name, without vLLM. Each floor's package says what its modules are for.
"""
