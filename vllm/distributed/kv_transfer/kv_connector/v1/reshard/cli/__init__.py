# SPDX-License-Identifier: Apache-2.0
"""`kv-plan`: says whether engines of two layouts would exchange KV caches, and who reads what.

It plans with the modules that the engines plan with: no GPU, no weights, no server. What a model
keeps it asks of the installed vLLM, in a process of its own. It stands on floors 1 to 3 and, like
them, imports neither vLLM nor torch. `vllm kv-plan` is the same, as a subcommand of vLLM's own.

command         arguments, and what is printed for them
layouts         which layouts engines may have
asking          a model -> engines, as vLLM and the connector would make them
sizes           sizes alone -> engines that keep heads or a latent, and nothing else
engines         what is known of an engine
verdict         served, left to stock vLLM's, or refused
planning        two engines -> a plan, and what it costs each rank
document        a plan as JSON
text            a plan as tables
svg             a plan as a drawing
"""

from .command import main

__all__ = ["main"]
