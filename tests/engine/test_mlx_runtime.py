"""What is MLX's own: batches that lanes join and leave, kinds of caches, what fails in them, how weights are kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from superfluidd.engine.port import Draw, EngineError, Feed, LoadFailed, OutOfCells, StepFailed
from superfluidd.engine.runtimes import mlx as runtime_module
from superfluidd.engine.runtimes.mlx import MlxRuntime
from superfluidd.engine.runtimes.mlx_state import pack, unpack
from superfluidd.engine.wire import LoadSpec
from superfluidd.types import SamplingParams
from tests.engine import tiny_mlx

# The runtime comes first: it chooses the BLAS that MLX binds to.
import mlx.core as mx  # isort: skip
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache  # isort: skip

pytestmark = pytest.mark.engine_mlx

Make = Callable[..., Path]
MODELS: dict[str, Callable[[Path], Path]] = {
    "plain": lambda path: tiny_mlx.write(path),
    "window": lambda path: tiny_mlx.build(path, tiny_mlx.GEMMA),
    "state": lambda path: tiny_mlx.build(path, tiny_mlx.MAMBA),
}
PROMPTS = ([72, 101, 108, 108, 111], [1, 2, 3], list(range(40, 75)))


def load(path: Path, **changed: Any) -> MlxRuntime:
    spec = LoadSpec("mlx", str(path), lanes=4, window=128, layout="per-sequence", cells=512)
    return MlxRuntime(replace(spec, **changed), lambda share: None)


@pytest.fixture(scope="module", params=list(MODELS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, MlxRuntime]:
    name: str = request.param
    return name, load(MODELS[name](tmp_path_factory.mktemp(name)))


@pytest.fixture
def runtime(kind: tuple[str, MlxRuntime]) -> MlxRuntime:
    _, runtime = kind
    for sequence in range(runtime.info.sequences):
        runtime.free(sequence)
    return runtime


@pytest.fixture
def plain(tmp_path: Path) -> MlxRuntime:
    return load(tiny_mlx.write(tmp_path / "plain"))


def draw(runtime: MlxRuntime, feed: int, tokens: Sequence[int]) -> int:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return runtime.choose(feed, Draw(params, len(tokens), tokens, 1, runtime.info.end_tokens)).token


def prefill(runtime: MlxRuntime, sequence: int, prompt: Sequence[int], chunk: int = 1000) -> list[int]:
    """Feed a prompt in chunks; the prompt and the first token."""
    at = runtime.length(sequence)
    while at < len(prompt):
        part = prompt[at : at + chunk]
        runtime.step([Feed(sequence, at, part, at + len(part) == len(prompt))])
        at += len(part)
    return [*prompt, draw(runtime, 0, prompt)]


def rounds(runtime: MlxRuntime, lanes: dict[int, list[int]], count: int) -> None:
    """Decode rounds of all these lanes, in one call each."""
    for _ in range(count):
        runtime.step([Feed(one, len(tokens) - 1, tokens[-1:], True) for one, tokens in lanes.items()])
        for index, tokens in enumerate(lanes.values()):
            tokens.append(draw(runtime, index, tokens))


def alone(runtime: MlxRuntime, prompt: Sequence[int], count: int) -> list[int]:
    """What a prompt says when nobody else is there."""
    tokens = prefill(runtime, 3, prompt)
    rounds(runtime, {3: tokens}, count)
    runtime.free(3)
    return tokens


def test_lanes_join_and_leave_in_any_order_and_say_what_they_say_alone(runtime: MlxRuntime) -> None:
    expected = [alone(runtime, prompt, 30) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 10, "a model that says something"
    lanes: dict[int, list[int]] = {0: prefill(runtime, 0, PROMPTS[0], 2)}
    rounds(runtime, lanes, 3)
    lanes[1] = prefill(runtime, 1, PROMPTS[1])
    rounds(runtime, lanes, 4)
    lanes[2] = prefill(runtime, 2, PROMPTS[2], 7)
    rounds(runtime, lanes, 9)
    waits = lanes.pop(0)
    rounds(runtime, lanes, 5)
    finished = lanes.pop(1)
    runtime.free(1)
    lanes[0] = waits
    rounds(runtime, lanes, 8)
    rounds(runtime, {2: lanes[2]}, 1)
    for got, whole in zip((lanes[0], finished, lanes[2]), expected, strict=True):
        assert len(got) > 20 or got is finished
        assert got == whole[: len(got)]
    assert runtime.cells_used() == sum(len(tokens) - 1 for tokens in lanes.values())


def test_prompts_in_one_pass_say_what_they_say_alone(runtime: MlxRuntime) -> None:
    """Of different lengths, some with context already, some not to the end."""
    prompts = [list(range(40, 50)), list(range(60, 69)), list(range(90, 102))]
    expected = [alone(runtime, prompt, 12) for prompt in prompts]
    runtime.step([Feed(1, 0, prompts[1][:2], False)])
    computed = runtime.computed()
    runtime.step([Feed(0, 0, prompts[0], True), Feed(1, 2, prompts[1][2:], True), Feed(2, 0, prompts[2][:8], False)])
    assert runtime.computed() - computed == 10 + 7 + 8, "padding is not counted"
    lanes = {0: [*prompts[0], draw(runtime, 0, prompts[0])], 1: [*prompts[1], draw(runtime, 1, prompts[1])]}
    with pytest.raises(StepFailed, match="kept no logits"):
        draw(runtime, 2, prompts[2])
    assert [runtime.length(sequence) for sequence in range(3)] == [10, 9, 8]
    rounds(runtime, lanes, 4)
    lanes[2] = prefill(runtime, 2, prompts[2])
    rounds(runtime, lanes, 7)
    for number, tokens in lanes.items():
        assert tokens == expected[number][: len(tokens)]


def test_what_is_saved_is_brought_back_into_another_sequence(runtime: MlxRuntime) -> None:
    """Also of a lane that is a row of the batch, and also into a runtime that was loaded anew."""
    expected = alone(runtime, PROMPTS[2], 20)
    lanes = {0: prefill(runtime, 0, PROMPTS[2]), 1: prefill(runtime, 1, PROMPTS[0])}
    rounds(runtime, lanes, 6)
    state = runtime.export(0)
    held = runtime.length(0)
    runtime.free(0)
    rounds(runtime, {1: lanes[1]}, 2)
    runtime.restore(2, state, held)
    assert runtime.length(2) == held
    rounds(runtime, {2: lanes[0], 1: lanes[1]}, 14)
    assert lanes[0] == expected
    assert len(state) < 100_000, "no room that is only reserved is saved"


def test_a_copy_goes_its_own_way(runtime: MlxRuntime) -> None:
    tokens = prefill(runtime, 0, PROMPTS[0])
    rounds(runtime, {0: tokens}, 5)
    expected = alone(runtime, PROMPTS[0], 12)
    runtime.copy(0, 1, runtime.length(0))
    fork = [*tokens[:-1], (tokens[-1] + 1) % 200]
    rounds(runtime, {1: fork}, 3)
    rounds(runtime, {0: tokens, 1: fork}, 7)
    assert tokens == expected[: len(tokens)]
    runtime.free(1)
    assert prefill(runtime, 1, fork[:-1])[-1] == fork[-1], "the fork is what its tokens say"


def test_what_cannot_be_cut_says_so_and_is_unchanged(kind: tuple[str, MlxRuntime], runtime: MlxRuntime) -> None:
    name, _ = kind
    tokens = prefill(runtime, 0, PROMPTS[0])
    rounds(runtime, {0: tokens}, 20)
    assert runtime.info.cut == {"plain": "anywhere", "window": "window", "state": "head"}[name]
    assert runtime.cut(0, 9) == (name == "plain")
    if name != "plain":
        with pytest.raises(StepFailed):
            runtime.copy(0, 1, 9)
        assert runtime.length(1) == 0
        assert runtime.length(0) == 25
        rounds(runtime, {0: tokens}, 3)
        assert tokens == alone(runtime, PROMPTS[0], 23)
    assert runtime.cut(0, 0)
    assert runtime.length(0) == 0
    # A window that was never full can be cut, and goes on rightly.
    if name == "window":
        again = prefill(runtime, 0, PROMPTS[0])
        rounds(runtime, {0: again}, 4)
        assert runtime.cut(0, 7)
        del again[8:]
        rounds(runtime, {0: again}, 10)
        assert again == alone(runtime, PROMPTS[0], 12)


# -- failures -----------------------------------------------------------------------------------------------------


class Breaks:
    """A layer that raises once, when those before it have taken the tokens in already."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.armed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.armed:
            self.armed = False
            raise RuntimeError("out of memory")
        return self._layer(*args, **kwargs)


def test_a_step_that_fails_half_way_leaves_nothing(plain: MlxRuntime) -> None:
    expected = [alone(plain, prompt, 14) for prompt in PROMPTS[:2]]
    lanes = {index: prefill(plain, index, prompt) for index, prompt in enumerate(PROMPTS[:2])}
    rounds(plain, lanes, 4)
    layers = plain._model.model.layers
    layer = layers[1] = Breaks(layers[1])
    for which in ("together", "one", "several tokens", "prompts together"):
        failing = [Feed(one, len(tokens) - 1, tokens[-1:], True) for one, tokens in lanes.items()]
        if which != "together":
            failing = failing[:1]
        if which == "several tokens":
            failing = [Feed(0, failing[0].start, [*failing[0].tokens, 5, 6], True)]
        if which == "prompts together":
            failing = [Feed(one, len(tokens) - 1, [*tokens[-1:], 9, 8], True) for one, tokens in lanes.items()]
        layer.armed = True
        held = [plain.length(one) for one in lanes]
        with pytest.raises(StepFailed, match="MLX failed: RuntimeError: out of memory"):
            plain.step(failing)
        assert [plain.length(one) for one in lanes] == held
        rounds(plain, lanes, 2)
    rounds(plain, lanes, 2)
    assert list(lanes.values()) == expected


def test_a_lane_that_cannot_be_taken_out_of_the_batch_is_lost_alone(
    plain: MlxRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [alone(plain, prompt, 12) for prompt in PROMPTS[:2]]
    lanes = {index: prefill(plain, index, prompt) for index, prompt in enumerate(PROMPTS[:2])}
    rounds(plain, lanes, 4)
    extract = BatchKVCache.extract

    def broken(self: Any, row: int) -> Any:
        raise IndexError("forced")

    monkeypatch.setattr(BatchKVCache, "extract", broken)
    with pytest.raises(StepFailed, match="KV of sequence 0 was lost"):
        plain.export(0)
    monkeypatch.setattr(BatchKVCache, "extract", extract)
    assert (plain.length(0), plain.length(1)) == (0, len(lanes[1]) - 1)
    with pytest.raises(StepFailed, match="sequence 0 holds 0 tokens, not"):
        plain.step([Feed(0, len(lanes[0]) - 1, lanes[0][-1:], True)])
    rounds(plain, {1: lanes[1]}, 8)
    assert lanes[1] == expected[1]
    again = prefill(plain, 0, PROMPTS[0])
    rounds(plain, {0: again}, 12)
    assert again == expected[0], "the next request is served"


@pytest.mark.parametrize("method", ["filter", "extend", "merge"])
def test_a_batch_that_cannot_change_is_dissolved(
    plain: MlxRuntime, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Whoever is in it goes on alone; a step that needed it fails and can be taken apart."""
    expected = [alone(plain, prompt, 12) for prompt in PROMPTS]
    lanes = {index: prefill(plain, index, prompt) for index, prompt in enumerate(PROMPTS)}
    two = {one: lanes[one] for one in (0, 1)}
    rounds(plain, two, 4)

    def broken(*_: Any) -> Any:
        raise ValueError("forced")

    whole = getattr(BatchKVCache, method)
    monkeypatch.setattr(BatchKVCache, method, classmethod(broken) if method == "merge" else broken)
    if method == "filter":
        plain.free(1)
        rounds(plain, {0: lanes[0]}, 2)
    else:
        with pytest.raises(StepFailed, match="the batch could not be made: ValueError: forced"):
            rounds(plain, lanes, 1)
        for one in two:
            rounds(plain, {one: lanes[one]}, 2)
    monkeypatch.setattr(BatchKVCache, method, classmethod(whole.__func__) if method == "merge" else whole)
    rounds(plain, {0: lanes[0], 2: lanes[2]}, 6)
    assert lanes[0] == expected[0]
    assert lanes[2] == expected[2][: len(lanes[2])]


def test_a_state_that_is_none_of_this_model_is_refused_and_the_sequence_is_empty(plain: MlxRuntime) -> None:
    prefill(plain, 0, PROMPTS[0])
    state = plain.export(0)
    layers = unpack(state)[1:]
    wrong = {
        "cut off": state[:-3],
        "no state": b"garbage",
        "empty": b"",
        "another": pack([5, *layers[:1]]),
        "too short": pack([6, *layers]),
        "a text": pack([5, [], []]),
        "none": pack([0, *layers]),
    }
    for name, data in wrong.items():
        with pytest.raises(EngineError):
            plain.restore(1, data, 5)
        assert plain.length(1) == 0, name
    with pytest.raises(EngineError):
        plain.restore(1, state, 6)
    plain.restore(1, state, 4)
    assert prefill(plain, 1, PROMPTS[0]) == prefill(plain, 2, PROMPTS[0])


def test_tokens_and_lengths_that_cannot_be_are_refused_before_anything_is_computed(plain: MlxRuntime) -> None:
    computed = plain.computed()
    for bad in ([-1], [plain.info.vocabulary], [1, 2, 10**9]):
        with pytest.raises(StepFailed, match="outside the vocabulary of 262"):
            plain.step([Feed(1, 0, [1, 2], False), Feed(0, 0, bad, True)])
    with pytest.raises(OutOfCells, match="no room: sequence 0 holds 0 of 128"):
        plain.step([Feed(0, 0, [1] * 129, True)])
    with pytest.raises(StepFailed, match="sequence 0 holds 0 tokens, not 3"):
        plain.step([Feed(0, 3, [1], True)])
    assert plain.cells_used() == 0
    assert plain.computed() == computed
    with pytest.raises(StepFailed, match="kept no logits"):
        plain.choose(0, Draw(SamplingParams(), 0, [], 0, ()))


# -- loading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "half", "dense", "kept"),
    [(0, False, False, "float32"), (0, True, False, "float32"), (4, True, False, "4-bit"), (8, False, False, "8-bit"),
     (4, True, True, "float32")],
)  # fmt: skip
def test_weights_of_every_kind_are_loaded_and_computed_in_float32(
    tmp_path: Path, bits: int, half: bool, dense: bool, kept: str
) -> None:
    path = tiny_mlx.build(tmp_path, tiny_mlx.CONFIG, bits=bits, half=half)
    runtime = load(path, dense=dense)
    assert runtime.info.description == f"llama {kept}"
    assert runtime.info.kv_type == "float32"
    floats = {array.dtype for _, array in runtime_module._flat(runtime._model.parameters())} - {mx.uint32}
    assert floats == {mx.float32}, "half floats are emulated on a CPU"
    assert alone(runtime, PROMPTS[0], 5)[: len(PROMPTS[0])] == PROMPTS[0]
    if dense:
        packed = load(path)
        assert packed.info.weights_bytes < runtime.info.weights_bytes / 3
        assert alone(packed, PROMPTS[0], 8) == alone(runtime, PROMPTS[0], 8)


def test_what_it_says_about_itself(plain: MlxRuntime) -> None:
    info = plain.info
    assert (info.runtime, info.architecture, info.layout, info.device) == ("mlx", "llama", "per-sequence", "cpu")
    assert (info.lanes, info.window, info.cells, info.trained_context) == (4, 128, 512, 2048)
    assert (info.vocabulary, info.bytes_per_cell, info.cut) == (262, 512, "anywhere")
    assert info.weights_bytes == 4 * sum(array.size for array in tiny_mlx.weights().values())
    assert not info.abandons
    assert not info.reserves
    assert "(mlx " in info.version
    assert (info.bos_text, info.eos_text, info.chat_template) == ("<|im_start|>", "<|im_end|>", tiny_mlx.TEMPLATE)


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        (lambda: [KVCache(), QuantizedKVCache()], "its KV is kept in QuantizedKVCache, which MLX cannot batch"),
        (lambda: [KVCache(), RotatingKVCache(8, keep=4)], "keeps first tokens, which MLX drops in a batch"),
    ],
)
def test_caches_that_cannot_be_batched_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: Callable[[], list[Any]], words: str
) -> None:
    monkeypatch.setattr(runtime_module, "make_prompt_cache", lambda model: caches())
    with pytest.raises(LoadFailed, match=words):
        load(tiny_mlx.write(tmp_path))


def test_models_that_cannot_be_loaded_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"MLX cannot load .*FileNotFoundError"):
        load(tmp_path / "none")
    with pytest.raises(LoadFailed, match="Model type quux not supported"):
        load(tiny_mlx.write(tmp_path / "quux", {"model_type": "quux"}))
    with pytest.raises(LoadFailed, match="requires importing and running a custom module"):
        load(tiny_mlx.write(tmp_path / "code", {"model_file": "mine.py"}))
    with pytest.raises(LoadFailed, match=r"MLX cannot load .*ValueError: "):
        load(tiny_mlx.write(tmp_path / "layers", {"num_hidden_layers": 3}))


def test_code_of_a_model_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    path = tiny_mlx.write(tmp_path, {"model_file": "mine.py"})
    (path / "mine.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    assert load(path, trust_code=True).info.architecture == "llama"


# -- where MLX compiles -------------------------------------------------------------------------------------------


def test_the_compilers_cache_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off: list[bool] = []
    monkeypatch.setattr(runtime_module.mx, "disable_compile", lambda: off.append(True))
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    runtime_module._private_compiler_cache()
    made = tmp_path / "superfluidd"
    assert runtime_module.os.environ["TMPDIR"] == str(made)
    assert made.stat().st_mode & 0o777 == 0o700
    assert not off
    made.chmod(0o777)
    runtime_module._private_compiler_cache()
    assert off == [True], "others can write there: nothing is compiled"
    for environ, expected in (
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, Path("/c/superfluidd")),
        ({"XDG_CACHE_HOME": "c", "HOME": "/h"}, Path("/h/.cache/superfluidd")),
        ({}, None),
    ):
        assert runtime_module.compiler_cache(environ) == expected
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    off.clear()
    runtime_module._private_compiler_cache()
    assert not off


@pytest.mark.skipif(sys.platform != "linux", reason="macOS multiplies with Accelerate and Metal")
def test_a_blas_is_looked_for_and_its_absence_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    blas = runtime_module.blas
    monkeypatch.setattr(blas, "_loaded", None)
    monkeypatch.delitem(sys.modules, "mlx.core")
    assert not blas.preload(["libnothing-of-that-name.so"])
    blas.set_threads(2)
    loaded: list[tuple[str, int]] = []

    class Library:
        def openblas_set_num_threads(self, count: Any) -> None:
            loaded.append(("threads", count.value))

    def find(name: str, mode: int) -> Any:
        if name == "second":
            return Library()
        raise OSError(name)

    monkeypatch.setattr(blas.ctypes, "CDLL", find)
    assert blas.preload(["first", "second"])
    assert blas.preload([]), "once is enough"
    blas.set_threads(3)
    assert loaded == [("threads", 3)]
    monkeypatch.setitem(sys.modules, "mlx.core", mx)
    monkeypatch.setattr(blas, "_loaded", None)
    assert not blas.preload(["second"]), "too late: MLX is bound already"


# -- states as bytes ----------------------------------------------------------------------------------------------


def test_arrays_of_every_kind_survive_as_bytes() -> None:
    tree = [
        3,
        None,
        True,
        [mx.array([[1.5, -2.0]], dtype=dtype) for dtype in (mx.float32, mx.float16, mx.bfloat16)],
        mx.array([1, -2, 3], dtype=mx.int32),
        mx.zeros((2, 0, 4)),
        mx.arange(24).reshape(2, 3, 4)[:, 1:, :],
    ]
    found = unpack(pack(tree))
    assert found[:3] == [3, None, True]
    for one, other in zip([*tree[3], *tree[4:]], [*found[3], *found[4:]], strict=True):  # type: ignore[misc]
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert mx.array_equal(one, other)
    with pytest.raises(TypeError):
        pack(["text"])
    with pytest.raises(TypeError):
        pack([mx.array([1j])])
