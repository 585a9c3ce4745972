"""The scheduler: pure policy. No clock, no I/O, no async, no logging. Time and memory come in as arguments.

Theory of operation
-------------------

A *request* waits in the FIFO of its class, runs in a *lane*, and ends. A lane is a seat in the engine: a sequence of
KV and a promise of cells. The world around (:mod:`superfluidd.daemon.model`) turns one crank::

    plan = scheduler.plan(now)            # what the next tick shall do
    ...                                   # the engine runs it; every token comes in through scheduler.observe(...)
    effects = scheduler.apply(report, now)

and may call ``submit``, ``finish``, ``set_qos``, ``set_caps`` and ``observe`` between the two. Those only mark; nothing
is seated or unseated while a plan is in flight, except in the books: a finished request's cells are free for the
*next* plan, which empties its sequence before it seats anyone. ``urgency`` says whether the tick in flight should end
early because of what was marked; ``take_effects`` what a plan has done to requests.

Three rules hold everywhere:

* **Cells are promised once.** A request is seated only if its prompt and everything it may still generate fit beside
  what was promised to the others (:mod:`~superfluidd.scheduling.pool`). So nobody has to be thrown out because the
  pool ran full; some wait instead. What a preempted request leaves in KV is *held*: kept while nobody needs the room.
* **A token counts when it is observed.** ``observe`` records it before anyone sees it. A report only confirms counts.
  So a worker that dies in mid-tick costs work, never tokens: its lanes go back to the heads of their queues with
  everything observed so far, and are prefilled again.
* **Order is a value.** Ties are broken by (class, arrival); no set and no hash order reaches a plan. The same calls
  give the same plans, byte for byte.

Who gets a lane is decided once a tick (:mod:`.admission`): the head of the best class, where waiting makes a class
better (:mod:`.queues`) and caps and pauses close one (:mod:`.lanes`); with lanes taken from lower classes if need be
(:mod:`.preemption`). Then who ticks (:mod:`.turns`), how long (:mod:`.budget`), and what each lane gets
(:mod:`.planner`). Every decision is written down in the request's trail (:mod:`.trail`).

Reading order: :mod:`.plan` (the records), :mod:`.request` (phases), :mod:`.qos`, :mod:`.queues`, :mod:`.lanes`,
:mod:`.pool`, :mod:`.preemption`, :mod:`.admission`, :mod:`.budget`, :mod:`.planner`, :mod:`.turns`, :mod:`.books` (the
state, and every way to look at it), :mod:`.scheduler`.
"""
