# SPDX-License-Identifier: Apache-2.0
"""The requests that a worker reads, from the scheduler's order until nothing writes for them.

consumer                    all of them: `_read` is the life of each, `_leave` its end
incoming                    one of them: its state, log and trace
prefetch                    what is read of a prompt while it is computed
verifying                   first requests, which are read once more, another way, and compared
endings                     what is reported and released, and blocks that may still be written
notifier                    what producers are told, and the leases that are renewed
"""
