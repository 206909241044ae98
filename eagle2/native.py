"""The lean forward's products, and whole layers over a few rows, in C (``native.c``), where this machine can compile it.

Compiled once, by the C compiler that is there, for the processor that is there, into the cache folder.  Where that cannot
be done (no compiler, another processor than x86-64 with AVX2, another system than Linux) `library` is None and everything
runs on torch's operations.  ``EAGLE2_NATIVE=0`` asks for that.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from torch.nn import functional as F

from .models import cache_dir

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fopenmp", "-fPIC")
NEEDS = ("avx2", "fma", "f16c")
PANEL = 16  # outputs whose weights lie together, as in native.c
UNPAIRED, PAIRED = (torch.float16, torch.float32, torch.int8), (torch.bfloat16, torch.int8)
COMPILE_SECONDS = 120
OPENMP = re.compile(r"/lib(gomp|omp|iomp5)\b[^/]*\.so[^/]*$")

log = logging.getLogger(__name__)


class _LinearStruct(ctypes.Structure):
    _fields_ = (
        ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64), ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("scale", ctypes.c_float), ("bytes", ctypes.c_int32),
        ("pairs", ctypes.c_int32),
    )  # fmt: skip


NORMS = ("attention_norm", "query_norm", "key_norm", "mlp_norm")
LINEARS = ("qkv", "out", "gate_up", "down")


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in NORMS),
        *((name, _LinearStruct) for name in LINEARS),
    )


class _BlocksStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "width", "inner", "heads", "kv_heads", "size")),
        ("eps", ctypes.c_float), ("layer", ctypes.c_void_p), ("final_norm", ctypes.c_void_p),
    )  # fmt: skip


class _PassStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "total", "newest")),
        *((name, ctypes.c_void_p) for name in ("visible", "turns", "kv")),
        *((name, ctypes.c_int64) for name in ("layer_stride", "head_stride", "paired")),
    )  # fmt: skip


class NativeError(RuntimeError):
    """Why there is no native code here."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None, with the reason logged, where they cannot be had."""
    if os.environ.get("EAGLE2_NATIVE") == "0":
        return None
    if missing := [name for name in NEEDS if name not in _processor_flags()]:
        log.info("no native code: this is no x86-64 Linux machine with %s", ", ".join(missing))
        return None
    try:
        loaded = _load(_compiled())
        _check(loaded)
    except NativeError as error:
        log.warning("no native code: %s. Decoding runs on torch's operations, at about half of the speed.", error)
        return None
    return loaded


def build() -> str | None:
    """Which compiled code runs here: another name for another source, compiler flag or processor; None for none."""
    return None if library() is None else _key()


def _key() -> str:
    parts = (SOURCE.read_text(encoding="utf-8"), *FLAGS, *sorted(_processor_flags()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compiled() -> Path:
    """The shared object for this source, compiler flags and processor; compiled where it is not in the cache folder."""
    folder = cache_dir() / "native"
    path = folder / f"{_key()}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):  # those who start together compile once
            if not path.exists():
                _compile(path)
        about = path.stat()
    except OSError as error:
        raise NativeError(f"the cache folder {folder} cannot be used ({error})") from error
    if about.st_uid not in (0, os.getuid()) or about.st_mode & 0o022:
        raise NativeError(f"others than this user may have written {path}")  # what is loaded runs
    return path


def _processor_flags() -> frozenset[str]:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return frozenset()
    with suppress(OSError):
        if found := re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return frozenset(found[1].split())
    return frozenset()


def _compile(path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc"))), None)
    if compiler is None:
        raise NativeError("there is no C compiler (cc or gcc)")
    with tempfile.TemporaryDirectory(dir=path.parent) as building:
        made, final = Path(building) / "native.o", Path(building) / "native.so"
        # Linked without -fopenmp: its functions are those of torch's OpenMP, whose threads are at work already.
        for command in (
            (compiler, *FLAGS, "-c", str(SOURCE), "-o", str(made)),
            (compiler, "-shared", str(made), "-o", str(final), "-lm"),
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
            except subprocess.TimeoutExpired as error:
                raise NativeError(f"{compiler} took more than {COMPILE_SECONDS} seconds") from error
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                raise NativeError(f"{compiler} failed: {lines[-1]}")
        final.chmod(0o755)
        os.replace(final, path)


def _load(path: Path) -> ctypes.CDLL:
    try:
        # The OpenMP runtime that torch has loaded, for all: a second one would have threads of its own on the same cores.
        mapped = [line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()]
        files = sorted({Path(name) for (name,) in filter(None, mapped) if OPENMP.search(name)})
        ours = [file for file in files if file.is_relative_to(Path(torch.__file__).parent)]
        for runtime in ours or files:
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"what was compiled cannot be loaded ({error})") from error
    pointer, count, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    found.eagle2_pairs.argtypes = ()
    found.eagle2_pairs.restype = ctypes.c_int32
    found.eagle2_linear.argtypes = (pointer, pointer, count, pointer, threads)
    found.eagle2_linear.restype = None
    found.eagle2_top.argtypes = (pointer, count, count, count, threads, pointer, pointer, threads)
    found.eagle2_top.restype = None
    found.eagle2_above.argtypes = (pointer, count, pointer, pointer, count, pointer, threads)
    found.eagle2_above.restype = None
    found.eagle2_keep.argtypes = (pointer, *(count,) * 6, pointer, count)
    found.eagle2_keep.restype = None
    found.eagle2_scratch.argtypes = (pointer, pointer, threads)
    found.eagle2_scratch.restype = count
    found.eagle2_layers.argtypes = (pointer, pointer, pointer, pointer, threads)
    found.eagle2_layers.restype = None
    return found


def _check(loaded: ctypes.CDLL) -> None:
    """Products as torch's, before anything relies on them."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(40, 24, generator=generator).half(), torch.randn(26, 24, generator=generator)
    whole = (weight * 20).to(torch.int8)
    kinds = [(weight, False), (weight.float(), False), (whole, False)]
    if loaded.eagle2_pairs():
        kinds += [(weight.bfloat16(), True), (whole, True)]
    for each, pairs in kinds:
        linear = NativeLinear(loaded, each, pairs=pairs)
        expected = F.linear(x.bfloat16().float() if pairs else x, each.float())
        for rows in range(1, len(x) + 1):
            if not torch.allclose(linear(x[:rows]), expected[:rows], rtol=1e-4, atol=1e-4):
                raise NativeError("what was compiled gives wrong results")


class NativeLinear:
    """``x [N, in] -> float32 [N, out]``: ``weight [out, in]`` in float16, float32 or int8, products and sums in float32.

    With ``pairs``, where the processor has AVX512-BF16 (``library.eagle2_pairs()``), ``weight`` is in bfloat16 or int8, inputs
    are rounded to bfloat16, and their exact products are summed in float32.  Weights in bfloat16 need it.
    ``scale``, a power of two, and ``scales [out]`` multiply the sums before ``bias`` is added.  The weight is copied.
    ``many``, where it is set, runs instead for more than ``FEW`` rows.
    """

    FEW = 64

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0,
        scales: Tensor | None = None, *, pairs: bool = False,
    ) -> None:  # fmt: skip
        self.pairs = pairs = pairs or weight.dtype == torch.bfloat16
        if weight.dtype not in (PAIRED if pairs else UNPAIRED) or (pairs and not library.eagle2_pairs()):
            how = " with inputs in bfloat16" if pairs else ""
            raise ValueError(f"there are no native products of weights in {weight.dtype}{how} here")
        self.outputs, self.inputs = weight.shape
        self.library = library
        self.many: Callable[[Tensor], Tensor] | None = None
        padding = -self.outputs % PANEL
        self._odd = self.inputs % 2 if pairs else 0
        padded = F.pad(weight.detach(), (0, self._odd, 0, padding))
        together = padded.view(-1, PANEL, (self.inputs + self._odd) // (1 + pairs), 1 + pairs)
        self._weights = together.transpose(1, 2).contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._scales = None if scales is None else F.pad(scales.detach().float(), (0, padding))
        self.struct = _LinearStruct(
            self.outputs, self.inputs + self._odd, self._weights.data_ptr(), _pointer(self._bias), _pointer(self._scales), scale,
            weight.element_size(), pairs,
        )  # fmt: skip
        self._address = ctypes.addressof(self.struct)

    @classmethod
    def rounded(cls, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """``weight`` in eight bits, with a scale for each output: half of float16's bytes, for drafts.

        Where there are ``pairs``, inputs are rounded to bfloat16.
        """
        weight = weight.detach().float()
        scales = weight.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        weight = (weight / scales[:, None]).round().to(torch.int8)
        return cls(library, weight, bias, scales=scales, pairs=bool(library.eagle2_pairs()))

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x) if self.many is None or len(x) <= self.FEW else self.many(x)

    def few(self, x: Tensor) -> Tensor:
        """The same without ``many``: a row's result does not depend on how many there are."""
        if x.dim() != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"rows of {self.inputs} numbers are needed, not {list(x.shape)}")
        if self._odd:
            x = F.pad(x, (0, self._odd))
        x = x.to(torch.bfloat16 if self.pairs else torch.float32).contiguous()
        y = torch.empty(len(x), self.outputs)
        self.library.eagle2_linear(self._address, x.data_ptr(), len(x), y.data_ptr(), torch.get_num_threads())
        return y


def top(x: Tensor, k: int, *, softmax: bool = False) -> tuple[list[list[float]], list[list[int]]]:
    """The ``k`` highest of each row of ``x [N, V]`` and where they are, highest first; ``softmax``: of its log-softmax.

    All values of a row that holds NaN may be NaN.  In native code where there is any, else by torch.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and (native := library()) is not None:
        x = x.contiguous()
        rows, n = x.shape
        if not 1 <= k <= n:
            raise ValueError(f"k must lie between 1 and {n}, not {k}")
        values, ids = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        native.eagle2_top(x.data_ptr(), rows, n, k, softmax, values.data_ptr(), ids.data_ptr(), torch.get_num_threads())
        return values.tolist(), ids.tolist()
    if k == 1 and not softmax:  # several times quicker than topk or argmax, and the first of equals as above
        best = x.max(-1, keepdim=True)
        return best.values.tolist(), best.indices.tolist()
    found = (x.log_softmax(-1) if softmax else x).topk(k, -1)
    return found.values.tolist(), found.indices.tolist()


def above(x: Tensor, rows: Sequence[int], columns: Sequence[int]) -> list[int]:
    """For each pair of them how many numbers of that row of ``x [N, V]`` are greater than the one in that column."""
    n, width = x.shape
    if not all(0 <= row < n and 0 <= column < width for row, column in zip(rows, columns, strict=True)):
        raise ValueError(f"a row or column does not lie within {n} x {width}")
    if x.device.type == "cpu" and x.dtype == torch.float32 and (native := library()) is not None:
        x, count = x.contiguous(), len(rows)
        numbers = ctypes.c_int64 * count
        found = numbers()
        native.eagle2_above(
            x.data_ptr(), width, numbers(*rows), numbers(*columns), count, found, torch.get_num_threads()
        )  # fmt: skip
        return list(found)
    each = [torch.count_nonzero(x[row] > x[row, column]) for row, column in zip(rows, columns)]  # no copy of rows
    return torch.stack(each).tolist() if each else []


class NativeLayers:
    """All layers of a model over a few rows, in one call.

    A row's result has the same bits whichever other rows ride along: every sum is over the same numbers in the same order,
    attention's over the row's own path by position.
    """

    def __init__(self, layers: Sequence[Any], *, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        """``layers``: of `eagle2.lean`, their tensors in float32; ValueError for those that `refusal` names."""
        if why := self.refusal(layers, head_dim):
            raise ValueError(why)
        self._layers = list(layers)  # whose memory the structures point to
        first: NativeLinear = layers[0].qkv
        self._library = first.library
        self._width, self._size, self._kv_heads = first.inputs, head_dim, kv_heads
        self.few_only = first.many is not None  # many rows are quicker otherwise
        # Attention too is made of products in bfloat16.
        self.pairs = all(getattr(layer, name).pairs for layer in layers for name in LINEARS) and not head_dim % PANEL
        self._structs = (_LayerStruct * len(layers))(
            *(
                _LayerStruct(
                    *(_pointer(getattr(layer, name)) for name in NORMS),
                    *(getattr(layer, name).struct for name in LINEARS),
                )
                for layer in layers
            )
        )
        self._blocks = _BlocksStruct(
            len(layers), self._width, layers[0].down.inputs, heads, kv_heads, head_dim, eps,
            ctypes.addressof(self._structs),
        )  # fmt: skip

    @staticmethod
    def refusal(layers: Sequence[Any], head_dim: int) -> str | None:
        """Why these layers must run otherwise; None where they need not."""
        linears = [getattr(layer, name) for layer in layers for name in LINEARS]
        if not all(isinstance(linear, NativeLinear) for linear in linears):
            return "its products are not native ones"
        if layers[0].qkv.inputs % 8 or head_dim % 8:
            return "the widths of rows and heads must be multiples of 8"
        if layers[0].down.inputs % PANEL:
            return f"the inner width must be a multiple of {PANEL}"
        return None

    def end_with(self, norm: Tensor) -> None:
        """The norm that follows the last layer becomes part of `run`."""
        self._final_norm = norm
        self._blocks.final_norm = _pointer(norm)

    def new_cache(self, slots: int) -> Tensor:
        """``[layers, 2 * kv_heads, at least slots, head_dim]``, keys, then values; with ``pairs`` their order is `run`'s and `keep`'s own."""
        room, dtype = (-(-slots // PANEL) * PANEL, torch.bfloat16) if self.pairs else (slots, torch.float32)
        return torch.empty(len(self._layers), 2 * self._kv_heads, room, self._size, dtype=dtype)

    def keep(self, kv: Tensor, length: int, rows: Sequence[int]) -> None:
        """Move the slots ``length + rows`` to ``length`` and behind, in a `new_cache` of ``pairs``; ``rows`` ascend."""
        index = torch.tensor(rows)
        self._library.eagle2_keep(
            kv.data_ptr(), len(self._layers), self._kv_heads, kv.stride(0), kv.stride(1), self._size, length,
            index.data_ptr(), len(rows),
        )  # fmt: skip

    def run(self, x: Tensor, turns: Tensor, visible: Tensor, kv: Tensor, total: int) -> None:
        """In place over ``x [N, width]``, float32 and contiguous.

        ``turns [N, head_dim / 2]``, complex64: the rotations of the rows' positions.  ``visible [N, T]``: which of the newest
        T slots each row sees; all see those before.  ``kv``: of `new_cache`, or ``[layers, 2 * kv_heads, slots, head_dim]``
        in float32; the rows' own keys and values are written to the slots ``total - N`` up to ``total``.
        """
        n, newest = visible.shape
        slots = kv.shape[2]
        fits = x.shape == (n, self._width) and turns.shape == (n, self._size // 2) and n <= newest <= total <= slots
        fits = fits and turns.dtype == torch.complex64 and visible.dtype == torch.bool
        if not fits or kv.shape != (len(self._layers), 2 * self._kv_heads, slots, self._size):
            raise ValueError("the tensors of a pass do not belong together")
        if not (x.is_contiguous() and kv.stride()[2:] == (self._size, 1) and x.dtype == torch.float32):
            raise ValueError("a pass needs rows in float32, each of them and of the cache's in one piece")
        paired = kv.dtype == torch.bfloat16
        if kv.dtype != torch.float32 and not (paired and self.pairs and slots % PANEL == 0):
            raise ValueError(f"a cache in {kv.dtype} with {slots} slots cannot be used here")
        turns, visible = turns.contiguous(), visible.contiguous()
        one = _PassStruct(
            n, total, newest, visible.data_ptr(), turns.data_ptr(), kv.data_ptr(), kv.stride(0), kv.stride(1),
            paired,
        )  # fmt: skip
        blocks, threads = ctypes.addressof(self._blocks), torch.get_num_threads()
        scratch = torch.empty(self._library.eagle2_scratch(blocks, ctypes.addressof(one), threads))
        self._library.eagle2_layers(blocks, ctypes.addressof(one), x.data_ptr(), scratch.data_ptr(), threads)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


__all__ = ["NativeError", "NativeLayers", "NativeLinear", "above", "build", "library", "top"]
