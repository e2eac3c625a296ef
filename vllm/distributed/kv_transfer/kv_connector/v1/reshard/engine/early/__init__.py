# SPDX-License-Identifier: Apache-2.0
"""Requests that another engine is still computing.

requests                    all of them, until each is offered
watched_engine              the board of one engine, and when it is read
watched_requests            what is known of one request
abandoned_reads             reads of boards that are no longer wanted
"""
