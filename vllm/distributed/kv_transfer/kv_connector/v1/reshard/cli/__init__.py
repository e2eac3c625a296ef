# SPDX-License-Identifier: Apache-2.0
"""`kv-plan`: shows how a decode engine would read the KV cache of a prefill engine.

It plans with the modules that the engines plan with, from sizes alone: no GPU, no model, no server.
It stands on floors 1 to 3 and, like them, imports neither vLLM nor torch, so that it answers at
once. `vllm kv-plan` is the same, as a subcommand of vLLM's own command line.

command          arguments, and what is printed for them
report           arguments -> a plan, and its figures
figures          what a plan costs each rank
layouts,
limits           which layouts and sizes it may be given
model            a model's config.json -> sizes
caches           what families keep beside heads or a latent
verdicts         what engines would serve, refuse or leave to upstream's, in words
recurrent_state  what layers keep, and which rank reads it from which
document         a plan as JSON
text, advice     a plan as tables, and what would be better
svg              a plan as a drawing
"""

from .command import main

__all__ = ["main"]
