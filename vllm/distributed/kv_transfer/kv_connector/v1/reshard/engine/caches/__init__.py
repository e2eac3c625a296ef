# SPDX-License-Identifier: Apache-2.0
"""A worker's KV caches: which planes they consist of, and what their bytes mean.

geometry                    vLLM's tensors and specifications -> planes of layers
cache_views, cache_formats  the order of a tensor's axes, and the format of what a backend writes
recurrent_state             the state of Mamba and linear attention
ownership                   which rank a worker is, and the layers and heads that it holds
drafts                      the layers of draft models
factors                     what must be equal in two engines
"""
