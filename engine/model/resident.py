"""A resident linear or token embedding held in int4 stands where transformers' module stood, and only its own bytes are
held."""

from __future__ import annotations

import re

import torch
from torch import nn

from engine.kernels import int4
from engine.kernels.formats import MatrixFormat
from engine.model.skeleton import parent_of

_LEAST = 2**16  # weights below this are not worth it: gates, low-rank pieces
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router)(?:\.|$)")


class Int4Matrix(nn.Module):
    """W [out_features, in_features] as int4 in `form`, standing for a weight of `dtype`."""

    def __init__(self, form: MatrixFormat, q: torch.Tensor, sz: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype
        self.out_features, self.in_features = form.shape
        self.register_buffer("q", q)
        self.register_buffer("sz", sz)

    def dense(self) -> nn.Module:
        """The linear or embedding that this stands for, in float32."""
        weight = int4.dequantise(self.q, self.sz, self.form.packing)
        if isinstance(self, Int4Embedding):
            return nn.Embedding.from_pretrained(weight)
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.bias = None if self.bias is None else nn.Parameter(self.bias.float(), requires_grad=False)
        return linear


class Int4Linear(Int4Matrix):
    """x [..., K] -> [..., N] in x.dtype."""

    def __init__(self, form: MatrixFormat, q: torch.Tensor, sz: torch.Tensor, linear: nn.Linear) -> None:
        super().__init__(form, q, sz, linear.weight.dtype)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = int4.matmul(x.reshape(-1, self.in_features), self.q, self.sz, self.form.packing)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class Int4Embedding(Int4Matrix):
    """ids [...] -> [..., K] in the embedding's dtype; only the rows looked up are dequantised."""

    def __init__(self, form: MatrixFormat, q: torch.Tensor, sz: torch.Tensor, embedding: nn.Embedding) -> None:
        super().__init__(form, q, sz, embedding.weight.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = int4.dequantise_rows(self.q, self.sz, ids.reshape(-1), self.form.packing)
        return rows.to(self.dtype).view(*ids.shape, self.in_features)


def is_router(path: str) -> bool:
    """Whether the module at `path` decides between experts."""
    return _ROUTER.search(path) is not None


def tied_modules(model: nn.Module) -> dict[str, str]:
    """Path of each module whose weight is another one's -> path of that one."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {target.rpartition(".")[0]: source.rpartition(".")[0] for target, source in tied.items()}


def quantisable(model: nn.Module, least: int = _LEAST) -> dict[str, nn.Module]:
    """Module path -> module of every linear with at least `least` weights that int4 can hold, and the token embedding.

    A large linear must have the shape of a packed kernel, for unpacking it at every step would be slow. Linears tied to
    the embedding come with it, not by themselves; it stays as it is where they cannot share its codes. Routers stay too.
    """
    tied, found = tied_modules(model), {}
    embedding = model.get_input_embeddings()
    for path, module in model.named_modules():
        if path in tied or is_router(path) or not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        rows, columns = module.weight.shape
        fast = rows % 16 == 0 or rows * columns < _LEAST
        heads = [model.get_submodule(target) for target, source in tied.items() if source == path]
        if module is embedding and type(module) is nn.Embedding:
            fits = not heads or (fast and all(type(head) is nn.Linear for head in heads))
        else:
            fits = type(module) is nn.Linear and fast and not heads
        if fits and columns % 32 == 0 and rows * columns >= least:
            found[path] = module
    return found


def int4_format(module: nn.Module, packing: str) -> MatrixFormat:
    """The int4 format of a linear's or embedding's weight in the given machine packing, where its shape allows."""
    return MatrixFormat.choose("int4", tuple(module.weight.shape), packing)


def replace_module(model: nn.Module, path: str, form: MatrixFormat, q: torch.Tensor, sz: torch.Tensor) -> None:
    """Put the codes in the place of the linear or embedding at `path`, and of every linear tied to it."""
    for name in (path, *(target for target, source in tied_modules(model).items() if source == path)):
        module = model.get_submodule(name)
        kind = Int4Embedding if isinstance(module, nn.Embedding) else Int4Linear
        parent, attribute = parent_of(model, name)
        setattr(parent, attribute, kind(form, q, sz, module))


def machine_packing(device: torch.device) -> str:
    """The packing in which `device` multiplies fastest."""
    return int4.native_packing() if device.type == "cpu" else "plain"


def quantise_linears(model: nn.Module) -> None:
    """Hold the large linears and the token embedding of a loaded model in int4, group 64, quantised by hqq one at a time.

    A head tied to the embedding shares its codes. What is int4 already stays as it is.
    """
    for path, module in quantisable(model).items():
        form = int4_format(module, machine_packing(module.weight.device))
        encoded = form.encode(module.weight.data)
        replace_module(model, path, form, encoded[".q"], encoded[".sz"])
