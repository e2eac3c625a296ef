# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the connector. All of it belongs to the scheduler's thread.

scheduler                   vLLM's calls
remote_reads                requests whose blocks other engines hold or compute: where each stands
receives                    which of a request's parameters and tokens count, and what is read
prompts                     requests that this engine computes, for those who ask for them
offers                      what is held, on its way to the workers
first_tokens                answers that begin with the token that the prefill engine sampled
"""
