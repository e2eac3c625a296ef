# SPDX-License-Identifier: Apache-2.0
"""KV-cache transfer between engines of any two tensor- and pipeline-parallel layouts.

A rank owns a box, layers x global KV heads. A destination rank needs its own box filled: intersect
it with the source ranks' boxes, elect one holder where several hold the same heads, and the result
is a list of reads. Data flows one way through the modules: `mesh` and `shards` say who holds what,
`plan` says who reads what from whom and who releases whom, `verify` checks a plan by other means.

These modules compute with values alone. They import neither vLLM nor torch, nor anything that
does input or output.
"""
