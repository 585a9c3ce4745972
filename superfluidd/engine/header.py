"""What the daemon needs to know of a model before anything is loaded, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from superfluidd.errors import ModelFileError


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


def integer(sources: Sequence[Mapping[str, Any]], key: str, default: int | None, most: int, where: str) -> int:
    """A number of a configuration.

    Args:
        sources: where to look for it, the first that has it counts.
        key: its name.
        default: where none has it; None if it must be there.
        most: the largest that can be right.
        where: the file, for messages.

    Raises:
        ModelFileError: it is missing or cannot be right.
    """
    value = next((found for source in sources if (found := source.get(key)) is not None), default)
    if value is None:
        raise ModelFileError(f"{where} does not say {key}; download the model again")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ModelFileError(f"{where} is damaged: its {key} cannot be right; download it again")
    return value
