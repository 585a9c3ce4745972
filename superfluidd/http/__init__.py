"""The HTTP edge: OpenAI's surface and the operator's pages over :class:`~superfluidd.daemon.service.Service`.

The path of a request:

1. :mod:`~superfluidd.http.server` accepts the connection and bounds how long a client may refuse to read; hypercorn
   speaks HTTP, Quart routes.
2. :mod:`~superfluidd.http.lifetime` opens the request's lifetime: its id, a nursery for its helpers, and the list of
   generations it owns. However the request ends, those are closed and their lanes are free.
3. :mod:`~superfluidd.http.openai` reads the body (:mod:`~superfluidd.http.body`), decodes and checks it
   (:mod:`~superfluidd.http.schema`, :mod:`~superfluidd.http.sampling`), renders and tokenizes the prompt, and submits
   one generation per choice (:mod:`~superfluidd.http.generate`). Everything that can be refused has been refused by
   now, so a refusal is a status code even for a stream.
4. :mod:`~superfluidd.http.replies` says what a reply looks like in bytes; :mod:`~superfluidd.http.sse` turns a stream
   of events into frames of it. A failure after the stream has opened is an error frame, then ``[DONE]``.

:mod:`~superfluidd.http.errors` is the one place that writes OpenAI's error envelope.
:mod:`~superfluidd.http.health`, :mod:`~superfluidd.http.metrics` and :mod:`~superfluidd.http.admin` only read views of
the service and never touch an engine. Another API is a translation onto ``generate``, in modules of its own.
"""
