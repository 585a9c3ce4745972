"""superfluidd: one daemon that schedules local language models for everyone on the machine.

Importing this package loads nothing but the version, so that ``sfctl`` and the worker process start fast.
"""

__version__ = "0.1.0"
