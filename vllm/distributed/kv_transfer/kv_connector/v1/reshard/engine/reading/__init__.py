# SPDX-License-Identifier: Apache-2.0
"""The requests that a worker reads, from the scheduler's order until nothing writes for them.

consumer                    all of them
readings                    the state and the deadline of each
prefetch, prefetcher        what is read of a prompt while it is computed
lease_checks                whether what was read was still held
completions                 what follows a read: notifications and reports
doubt                       blocks of failed requests that may still be written
notifier, renewals          what producers are told, and the leases that are renewed
"""
