"""What the daemon needs to know of a model before anything is loaded, whatever its format."""

from __future__ import annotations

import msgspec


class ModelHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as its files describe it.

    Attributes:
        path: the file or directory; ``file_bytes``: size of it all.
        architecture, name: as the files have them; the name may be empty.
        context_length: tokens the model was trained for.
        block_count: layers; ``embedding_length``: width of a token.
        head_count, head_count_kv: attention heads per layer, 0 where a layer has no attention.
        key_length, value_length: elements of a head's key and value.
        sliding_window: tokens a layer looks back at, 0 if that is all of them.
        recurrent: some layers keep a state instead of keys and values.
        quantization: as people write it, such as ``Q4_K_M``.
        chat_template: Jinja source, or empty.
        parameters: elements of all tensors; ``tensor_bytes``: what they take in memory; ``tensors``: how many there
            are.
        element_bytes: what a number in KV takes.
    """

    path: str
    file_bytes: int
    architecture: str
    name: str
    context_length: int
    block_count: int
    embedding_length: int
    head_count: tuple[int, ...]
    head_count_kv: tuple[int, ...]
    key_length: int
    value_length: int
    sliding_window: int
    recurrent: bool
    quantization: str
    chat_template: str
    parameters: int
    tensor_bytes: int
    tensors: int
    element_bytes: int = 2
