"""Prompts as token ids, so that both servers compute exactly the same ones.

Each starts with a nonce of its own, so that no prefix cache can answer for a prompt that was measured before.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import llama_cpp

from tests.bench.prepare_model import only_errors

SUBJECTS = (
    "how tides work",
    "the history of the bicycle",
    "why bread rises",
    "how a lighthouse is built",
    "what bees do in winter",
    "how glass is made",
    "the water cycle",
    "how to read a map",
)

_WORDS = (
    *("queue", "lane", "window", "cache", "page", "kernel", "thread", "barrier", "token", "prompt", "sampler", "logit"),
    *("tensor", "batch", "socket", "stream", "buffer", "frame", "clock", "signal", "process", "budget", "ledger"),
    *("index", "cursor", "lease", "quota", "shard", "replica", "vector", "matrix", "branch", "stack", "heap"),
    *("pointer", "register", "latch", "fence", "journal", "snapshot"),
)


class Prompts:
    """Makes prompts with a model's own tokenizer; loads the vocabulary only."""

    def __init__(self, model: Path) -> None:
        only_errors()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(model), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot read {model}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)

    def tokens(self, text: str) -> list[int]:
        """Token ids; control tokens in the text are taken as such."""
        data = text.encode()
        room = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), room, len(room), False, True)
        assert count >= 0
        return list(room[:count])

    def short(self, nonce: str, index: int) -> list[int]:
        """About 25 tokens: one turn of ChatML."""
        subject = SUBJECTS[index % len(SUBJECTS)]
        return self.tokens(
            f"<|im_start|>user\nNote {nonce}.{index}. Explain {subject}.<|im_end|>\n<|im_start|>assistant\n"
        )

    def document(self, nonce: str, length: int) -> list[int]:
        """Exactly so many tokens of made-up text."""
        draw = random.Random(nonce)
        found: list[int] = []
        sentence = 0
        while len(found) < length:
            words = " ".join(draw.choice(_WORDS) for _ in range(12))
            found += self.tokens(f"Note {nonce}.{sentence}: the {words}.\n")
            sentence += 1
        return found[:length]
