"""Engines: a narrow runtime port, the executor that drives it, and the worker process they live in.

* :mod:`.port`: what a runtime is and what it says about itself.
* :mod:`.executor`: one tick of a plan over a runtime, step by step.
* :mod:`.sampling`: logits to a token, as a function of (seed, position).
* :mod:`.threads`: how many compute threads the next step gets. :mod:`.neighbours`: how busy the machine is.
* :mod:`.runtimes`: llama.cpp, MLX, baseRT and the simulated one; nothing else imports those libraries.
* :mod:`.wire`, :mod:`.framing`: messages between daemon and worker; no sockets.
* :mod:`.worker`: the child process's loop. :mod:`.client`: the daemon's side of it. :mod:`.inprocess`: the same
  interface without a process, on virtual time.
* :mod:`.gguf`, :mod:`.fitting`, :mod:`.memory`: what a model file holds and how much of it fits.
"""
