"""A checkpoint's tensors are read by name, one at a time or one expert of them, from whichever shard holds them."""

from __future__ import annotations

from collections import OrderedDict

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import SourceError
from engine.store.mapping import Unit
from engine.store.source import Source, read_header


class Checkpoint:
    """The tensors of `source`. shards: tensor name -> shard; experts: in a layer. Shards stay open until released."""

    def __init__(self, source: Source, shards: dict[str, str], experts: int) -> None:
        self.source, self.shards, self.experts = source, shards, experts
        self.open: OrderedDict[str, object] = OrderedDict()

    @property
    def keys(self) -> list[str]:
        """Names of the tensors, as a plain checkpoint has them."""
        return list(self.shards)

    def shards_of(self, key: str) -> set[str]:
        """The shards that `key` is read from."""
        return {self.shards[key]}

    def holds_codes(self, key: str) -> bool:
        """Whether the weight `key` is held as int4 codes."""
        return False

    def needs_fp32(self, key: str) -> bool:
        """Whether the tensor `key` must be kept in fp32, whatever dtype the model has for it."""
        return False

    def codes(self, unit: Unit) -> dict[str, dict[str, torch.Tensor]] | None:
        """What `unit` makes, as int4 codes that the checkpoint holds already; None: it is to be built from floats."""
        return None

    def read(self, key: str, row: int | None) -> torch.Tensor:
        """The tensor `key`, or expert `row`'s slice of it [1, ...]. Raises SourceError naming the shard."""
        shard = self.shards[key]
        try:
            if shard not in self.open:
                path = self.source.open_shard(shard)
                read_header(path)
                self.open[shard] = safe_open(path, framework="pt")
            if row is None:
                return self.open[shard].get_tensor(key)
            rows = self.open[shard].get_slice(key)
            if rows.get_shape()[0] == self.experts:
                return rows[row : row + 1]
        except (SafetensorError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SourceError(f"cannot read {key} from {shard} of {self.source.name}: {reason}; "
                              "download the checkpoint again") from error  # fmt: skip
        raise SourceError(f"{key} in {shard} of {self.source.name} holds {rows.get_shape()[0]} experts where config.json "
                          f"says {self.experts}; the checkpoint does not match its config.json")  # fmt: skip

    def release(self, shard: str) -> None:
        """`shard` is not read any more."""
        self.open.pop(shard, None)
        self.source.release_shard(shard)
