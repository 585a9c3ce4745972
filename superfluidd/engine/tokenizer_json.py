"""The tokenizer of a model directory: ``tokenizer.json`` through the tokenizers library, and the files beside it.

Only data is read. No Python that a model brings along runs here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from superfluidd.engine.port import LoadFailed

TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "</s>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<reponame>",
    "<|file_sep|>",
)
"""Special tokens that end a generation wherever a model has them, whatever its configuration forgets: ends of turns and
texts, and what begins another file."""

FIM = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""Prefix, suffix and middle token, by the families that have them."""

SPACE = "▁"


class JsonTokenizer:
    """Text to tokens and back.

    Args:
        directory: of the model.
        vocabulary: logits of the model; a tokenizer may know fewer tokens.

    Raises:
        LoadFailed: there is no tokenizer, or it is of a kind whose tokens are no bytes.
    """

    def __init__(self, directory: Path, vocabulary: int) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise LoadFailed(f"the tokenizers library cannot be loaded ({error}); install superfluidd[mlx]") from error
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            self._special: Any = Tokenizer.from_str(text)
            self._plain: Any = Tokenizer.from_str(text)
            self._data: dict[str, Any] = json.loads(text)
        except FileNotFoundError:
            raise LoadFailed(f"{directory} has no tokenizer.json; download the model again, or convert it") from None
        except Exception as error:  # the library raises nothing more exact
            raise LoadFailed(f"{path} is no tokenizer: {error}") from error
        self._plain.encode_special_tokens = True
        self._vocabulary = vocabulary
        self._settings = read_json(directory / "tokenizer_config.json")
        self._bytes = _piece_bytes(self._data)
        self._added = {one["id"]: one for one in self._data.get("added_tokens") or ()}
        self.bos = self._named("bos_token")
        self.eos = self._named("eos_token")
        self.add_bos = self.bos >= 0 and list(self._special.encode("").ids)[:1] == [self.bos]
        self.chat_template = _chat_template(directory, self._settings)
        self.end_tokens = tuple(sorted(set(self._ends(directory))))
        self.fim = self._fim()

    def token(self, text: str) -> int:
        """Id of a token by its own name, or -1."""
        found = self._special.token_to_id(text) if text else None
        return -1 if found is None or found >= self._vocabulary else int(found)

    def text(self, token: int) -> str:
        """Name of a token, or nothing."""
        return str(self._special.id_to_token(token) or "") if token >= 0 else ""

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Token ids of a text. Thread-safe."""
        tokenizer = self._special if parse_special else self._plain
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return [self.bos, *ids] if add_bos and self.bos >= 0 else ids

    def pieces(self) -> list[bytes]:
        """The bytes of every token; control tokens, and ids that the tokenizer does not know, are empty."""
        return [self._piece(token) for token in range(self._vocabulary)]

    def _piece(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return b"" if added.get("special") else str(added["content"]).encode()
        return self._bytes(self.text(token))

    def _named(self, key: str) -> int:
        value = self._settings.get(key)
        return self.token(str(value.get("content", "") if isinstance(value, dict) else value or ""))

    def _ends(self, directory: Path) -> Iterator[int]:
        if self.eos >= 0:
            yield self.eos
        special = {str(one["content"]): token for token, one in self._added.items() if one.get("special")}
        yield from (special[text] for text in TURN_ENDS if text in special)
        for name in ("generation_config.json", "config.json"):
            value = read_json(directory / name).get("eos_token_id")
            for token in value if isinstance(value, list) else [value]:
                if isinstance(token, int) and 0 <= token < self._vocabulary:
                    yield token

    def _fim(self) -> tuple[int, int, int]:
        for names in FIM:
            prefix, suffix, middle = map(self.token, names)
            if min(prefix, suffix, middle) >= 0:
                return prefix, suffix, middle
        return -1, -1, -1


def read_json(path: Path) -> dict[str, Any]:
    """An object of a file; empty if there is no such file.

    Raises:
        LoadFailed: it holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LoadFailed(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise LoadFailed(f"{path} holds no JSON object; download the model again")
    return found


def _chat_template(directory: Path, settings: dict[str, Any]) -> str:
    try:
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    template = settings.get("chat_template") or read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _parts(data: object) -> Iterator[dict[str, Any]]:
    """A component of a tokenizer, and those it is a sequence of."""
    if isinstance(data, dict):
        yield data
        for key in ("decoders", "pretokenizers"):
            for part in data.get(key) or ():
                yield from _parts(part)


def _piece_bytes(data: dict[str, Any]) -> Callable[[str], bytes]:
    """How a token's name spells its bytes."""
    kinds = {part.get("type") for key in ("decoder", "pre_tokenizer") for part in _parts(data.get(key))}
    if "ByteLevel" in kinds:
        table = byte_level_alphabet()
        return lambda name: bytes(table[c] for c in name) if all(c in table for c in name) else name.encode()
    if kinds & {"Metaspace", "ByteFallback"} or any(
        part.get("type") == "Replace" for part in _parts(data.get("decoder"))
    ):
        return _fallback_bytes
    raise LoadFailed(
        f"its tokenizer decodes with {', '.join(sorted(map(str, kinds - {None}))) or 'nothing'}: only byte-level and "
        "byte-fallback tokenizers are known here; use the model's GGUF with llama.cpp"
    )


def _fallback_bytes(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            pass
    return name.replace(SPACE, " ").encode()


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: printable Latin-1 for itself, the others from
    U+0100 on, in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in shown}
    hidden = (byte for byte in range(256) if byte not in set(shown))
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
