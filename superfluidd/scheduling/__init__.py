"""The scheduler: pure policy. No clock, no I/O, no async, no logging. Time and memory come in as arguments.

Theory of operation
-------------------

A *request* waits in the FIFO of its class, runs in a *lane*, and ends. A lane is a seat in the engine: a sequence of
KV and a promise of cells. The world around (:mod:`superfluidd.daemon.model`) turns one crank::

    plan = scheduler.plan(now)            # what the next tick shall do
    ...                                   # the engine runs it; every token comes in through scheduler.observe(...)
    effects = scheduler.apply(report, now)

and may call ``submit``, ``finish`` and ``observe`` between the two. Those only mark; nothing is seated or
unseated while a plan is in flight, except in the books: a finished request's cells are free for the *next* plan,
which empties its sequence before it seats anyone.

Three rules hold everywhere:

* **Cells are promised once.** A request is seated only if its prompt and everything it may still generate fit beside
  what was promised to the others (:mod:`~superfluidd.scheduling.pool`). So nobody has to be thrown out because the
  pool ran full; some wait instead.
* **A token counts when it is observed.** ``observe`` records it before anyone sees it. A report only confirms counts.
  So a worker that dies in mid-tick costs work, never tokens: its lanes go back to the heads of their queues with
  everything observed so far, and are prefilled again.
* **Order is a value.** Ties are broken by (class, arrival); no set and no hash order reaches a plan. The same calls
  give the same plans, byte for byte.

Reading order: :mod:`.plan` (the records), :mod:`.request` (phases), :mod:`.queues`, :mod:`.pool`, :mod:`.budget`,
:mod:`.planner`, :mod:`.scheduler`.
"""
