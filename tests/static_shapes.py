"""What a CUDA graph does and forbids, without CUDA.

`Watch`: tensors live on the meta device, which has shapes and no values.  A value that the host asks for does not exist
there, so reading one raises by itself; what would be a copy between host and device on a GPU is one here too.

`replayed`: as with graphs, a key's first function is the one that runs ever after, and its results lie in one place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle2.graphs import Graphs

VALUE_DEPENDENT = {
    torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select, torch.ops.aten.equal,
    torch.ops.aten._unique2, torch.ops.aten.is_nonzero,
}  # fmt: skip
Operation = tuple[str, tuple[tuple[int, ...], ...]]  # name, shapes of its tensors


class Watch(TorchDispatchMode):
    """Fails on a read by the host; what runs within `Graphs.run` must stay on ``device``, and is noted in ``calls``."""

    def __init__(self, monkeypatch: Any, device: str = "meta") -> None:
        super().__init__()
        self.device = device
        self.calls: list[tuple[Any, list[Operation]]] = []
        self._inside: list[Operation] | None = None

        def run(graphs: Graphs, key: Any, function: Any) -> Any:
            self._inside = []
            self.calls.append((key, self._inside))
            try:
                return function()
            finally:
                self._inside = None

        monkeypatch.setattr(Graphs, "run", run)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in VALUE_DEPENDENT, f"{func} asks the host for a value"
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if self._inside is not None:
            away = {str(x.device) for x in tensors} - {self.device}
            assert not away, f"{func} touches {away} within a graph"
            self._inside.append((str(func), tuple(tuple(x.shape) for x in tensors)))
        return out


def replayed(monkeypatch: Any) -> None:
    """Make `Graphs.run` behave as on a GPU: what differs from the first call is lost, results are overwritten."""

    def run(graphs: Any, key: Any, function: Any) -> Any:
        if key not in graphs._captured:
            graphs._captured[key] = function, function()
            for place in tree_leaves(graphs._captured[key][1]):
                if place is not None:
                    place.fill_(0)  # a capture computes nothing
        first, results = graphs._captured[key]
        for place, new in zip(tree_leaves(results), tree_leaves(first()), strict=True):
            if place is not None:
                place.copy_(new)
        return results

    monkeypatch.setattr(Graphs, "run", run)
