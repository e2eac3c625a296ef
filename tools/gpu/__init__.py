# SPDX-License-Identifier: Apache-2.0
"""What somebody with a GPU is asked to run, with or without vLLM installed.

This much can be imported without anything but Python.
"""
