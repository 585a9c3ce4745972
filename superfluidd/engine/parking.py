"""KV on disk: sealed artifacts that outlive the worker and the daemon.

An artifact holds what a sequence held: a manifest, the token ids, the runtime's own form of their KV. It is written
whole under another name, synced and renamed, so there is never half of one under its own name. It is believed only if
everything about it fits: the model, the runtime and its version, the form, the tokens, the checksum. What does not fit
is removed and its tokens are computed again; a wrong token cannot come of it.

Writing is a thread's work, never the tick's. Reading is the tick's: a lane cannot begin before.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from superfluidd.engine.port import EngineError, EngineInfo
from superfluidd.scheduling.entries import TOKEN_BYTES, key_of

log = logging.getLogger(__name__)

MAGIC = b"SFPARK01"

SUFFIX, UNFINISHED = ".kv", ".tmp"

MOST_MANIFEST = 1 << 16

SAMPLES, SAMPLE = 64, 1 << 16
"""A model file is known by its size, its beginning, and so many blocks of so many bytes spread over the rest."""

BEGINNING = 4 << 20


class Identity(msgspec.Struct, frozen=True):
    """What KV must have been computed by to be of use: the model, the runtime and its version, the form of a state."""

    model: str
    runtime: str
    version: str
    encoding: str


class Manifest(msgspec.Struct, frozen=True):
    """The head of an artifact.

    Attributes:
        identity: what computed it.
        key: digest of the token ids; ``length``: how many there are.
        size: bytes of the state; ``checksum``: their digest.
    """

    identity: Identity
    key: str
    length: int
    size: int
    checksum: str


class Parked(msgspec.Struct, frozen=True, array_like=True):
    """An artifact that was found: its key, its token ids (32 bits each), and the bytes it takes on disk."""

    key: str
    tokens: bytes
    size: int


class Damaged(EngineError):
    """An artifact that cannot be used."""


def fingerprint(path: Path) -> str:
    """Which model a file or a directory of files holds, without reading all of it. An empty path stands for no file."""
    digest = hashlib.blake2b(digest_size=16)
    if path == Path():
        return digest.hexdigest()
    if path.is_dir():
        for part in sorted((*path.glob("*.json"), *path.glob("*.safetensors"))):
            digest.update(f"{part.name} {fingerprint(part)}\n".encode())
        return digest.hexdigest()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        digest.update(file.read(BEGINNING))
        for number in range(SAMPLES):
            file.seek(number * size // SAMPLES)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def identity(path: Path, info: EngineInfo) -> Identity:
    """What a loaded runtime's KV is good for. Raises :class:`OSError` if the model file cannot be read."""
    return Identity(fingerprint(path), info.runtime, info.version, f"{info.kv_type} {info.layout}")


class Store:
    """The artifacts of one model, in a directory of their own.

    Args:
        directory: made if missing, for the daemon's user alone.
        known: what the artifacts must have been computed by.
        on_sealed: told (key, bytes) from the writer's thread once one is safe, or (key, 0) if it cannot be.
        threaded: write in a thread; otherwise at once.

    Raises:
        OSError: the directory cannot be used, or another process uses it.
    """

    def __init__(
        self, directory: Path, known: Identity, on_sealed: Callable[[str, int], None], *, threaded: bool = True
    ) -> None:
        self._directory = directory
        self._known = known
        self._on_sealed = on_sealed
        self._pending: dict[str, tuple[bytes, bytes]] = {}
        self._lock = threading.Lock()
        self._failing = False
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._held = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._held)
            raise
        self._jobs: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="parking", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def close(self, grace: float = 5.0) -> None:
        """Finish what is being written, within ``grace`` seconds."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(grace)
            self._thread = None
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def scan(self) -> tuple[Parked, ...]:
        """Every artifact there is, longest unused first. What is unfinished or does not fit is removed."""
        found: list[tuple[float, Parked]] = []
        for path in self._directory.iterdir():
            if path.suffix == UNFINISHED:
                path.unlink(missing_ok=True)
            elif path.suffix == SUFFIX:
                try:
                    with open(path, "rb") as file:
                        manifest, start = self._head(path, file.read(12 + MOST_MANIFEST))
                        file.seek(start)
                        tokens = file.read(manifest.length * TOKEN_BYTES)
                        status = os.fstat(file.fileno())
                    self._check(manifest, tokens, start, status.st_size)
                except (OSError, Damaged) as error:
                    self._discard(path, str(error))
                    continue
                found.append((status.st_mtime, Parked(manifest.key, tokens, status.st_size)))
        return tuple(parked for _, parked in sorted(found, key=lambda pair: pair[0]))

    # -- writing --------------------------------------------------------------------------------------------------

    def seal(self, key: str, tokens: bytes, state: bytes) -> None:
        """Write an artifact, sooner or later; ``on_sealed`` is told how that went."""
        with self._lock:
            self._pending[key] = tokens, state
        if self._thread is not None:
            self._jobs.put(key)
        else:
            self._write(key)

    def refuse(self, key: str) -> None:
        """There is nothing to write after all."""
        self._on_sealed(key, 0)

    def _write_all(self) -> None:
        while (key := self._jobs.get()) is not None:
            self._write(key)

    def _write(self, key: str) -> None:
        with self._lock:
            job = self._pending.get(key)
        if job is None:
            return  # forgotten before its turn
        tokens, state = job
        manifest = Manifest(self._known, key, len(tokens) // TOKEN_BYTES, len(state), _checksum(state))
        head = msgspec.json.encode(manifest)
        unfinished, size = self._directory / (key + UNFINISHED), 0
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for part in (MAGIC, len(head).to_bytes(4, "little"), head, tokens, state):
                    size += file.write(part)
                file.flush()
                os.fsync(file.fileno())
            with self._lock:
                if self._pending.pop(key, None) is None:
                    unfinished.unlink()
                    return
                os.rename(unfinished, self._path(key))
            self._sync_directory()
        except OSError as error:
            size = 0
            with self._lock:
                self._pending.pop(key, None)
            unfinished.unlink(missing_ok=True)
            # One line for a disk that is full, not one for every prefix that does not get there.
            log.log(
                logging.DEBUG if self._failing else logging.WARNING,
                "%s: KV cannot be parked: %s; what leaves memory is computed again",
                self._directory,
                error.strerror or error,
            )
        self._failing = size == 0
        self._on_sealed(key, size)

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- reading --------------------------------------------------------------------------------------------------

    def recall(self, key: str, length: int) -> bytes:
        """The state of an artifact of at least ``length`` tokens.

        Raises:
            Damaged: there is none, or none that can be believed; it is gone now.
        """
        with self._lock:
            job = self._pending.get(key)
        if job is not None:
            return job[1]
        path = self._path(key)
        try:
            data = path.read_bytes()
            manifest, start = self._head(path, data[: 12 + MOST_MANIFEST])
            middle = start + manifest.length * TOKEN_BYTES
            self._check(manifest, data[start:middle], start, len(data))
            state = data[middle:]
            if manifest.key != key or manifest.length < length or _checksum(state) != manifest.checksum:
                raise Damaged("its checksum is wrong")
            os.utime(path)
        except (OSError, Damaged) as error:
            why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            self._discard(path, why)
            raise Damaged(f"parked KV {path.name}: {why}") from error
        return state

    def forget(self, key: str) -> None:
        """Remove an artifact, if it is there."""
        with self._lock:
            self._pending.pop(key, None)
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / (key + SUFFIX)

    def _discard(self, path: Path, why: str) -> None:
        log.warning("%s: %s; removed, its tokens are computed again", path, why)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", path, error.strerror)

    def _head(self, path: Path, data: bytes) -> tuple[Manifest, int]:
        """The manifest, and where the token ids begin. Raises :class:`Damaged`."""
        if data[:8] != MAGIC:
            raise Damaged("it is no parked KV of this version")
        end = 12 + int.from_bytes(data[8:12], "little")
        try:
            manifest = msgspec.json.decode(data[12:end], type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damaged("its manifest cannot be read") from error
        if path.stem != manifest.key or manifest.length < 1:
            raise Damaged("its name is not its key")
        return manifest, end

    def _check(self, manifest: Manifest, tokens: bytes, start: int, size: int) -> None:
        """Everything but the state itself. Raises :class:`Damaged`."""
        if manifest.identity != self._known:
            raise Damaged("it was made by another model, runtime or version")
        if size != start + manifest.length * TOKEN_BYTES + manifest.size:
            raise Damaged("it is not whole")
        if key_of(tokens) != manifest.key:
            raise Damaged("its tokens are not its own")


def _checksum(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=16).hexdigest()
