"""``superfluidd simulate``: a trace of arrivals through the very same scheduler, in virtual time, without an engine.

:mod:`.trace` reads and makes traces, :mod:`.world` lets time pass as the simulated engine would, :mod:`.stats` counts,
:mod:`.report` and :mod:`.plot` show, :mod:`.record` takes a trace from a running daemon, :mod:`.command` is the command
line.
"""
