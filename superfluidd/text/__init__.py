"""Tokens to text and back at the edge: pure state machines, no I/O, no engine.

* :mod:`~superfluidd.text.vocabulary`: the bytes of every token.
* :mod:`~superfluidd.text.utf8`: bytes to text without ever showing half a character.
* :mod:`~superfluidd.text.stops`: stop texts that span tokens.
* :mod:`~superfluidd.text.assembler`: the three together, one per reply.
* :mod:`~superfluidd.text.template`: chat messages to a prompt, in sandboxed Jinja.
"""
