"""vLLM's attention with COC_DETERMINISTIC=invariant: a backend of its registry, in place of CPU_ATTN.

Keys and values lie in vLLM's pages [page, G, size, D], keys first. The pages of a sequence are gathered into the blocks
of ops/attention.py, which has the order of sums. This module is imported once vLLM's registry asks for the backend.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ascend_parallel.ops.attention import KEYS, KeyBlocks, attend_last, attend_sequence

_base: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn")


class InvariantImpl(_base.CPUAttentionBackendImpl):  # type: ignore[misc]
    """The attention of one layer."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: Any,
        **named: Any,
    ) -> torch.Tensor:
        """Write the attention of the step's tokens to `output` [tokens, H, D]; None as metadata: a profile run."""
        if attn_metadata is None:
            return output
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        out, table = output.view(query.shape), attn_metadata.block_table
        decoded: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            count = starts[index + 1] - starts[index]
            if count == 1:
                decoded.setdefault((-(-length // KEYS) - 1).bit_length(), []).append(index)
            elif count:
                rows = slice(starts[index], starts[index + 1])
                blocks = gathered(kv_cache, table[index : index + 1], [length])
                out[rows] = attend_sequence(query[rows], blocks, length, self.scale).to(out.dtype)
        for alike in decoded.values():  # sequences of about as many keys, in one call
            of_alike, rows_of_alike = [lengths[index] for index in alike], [starts[index] for index in alike]
            blocks = gathered(kv_cache, table[alike], of_alike)
            out[rows_of_alike] = attend_last(query[rows_of_alike], blocks, of_alike, self.scale).to(out.dtype)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write keys and values [tokens, G, D] to their places in the pages."""
        keys, values = pages(kv_cache)
        slots = slot_mapping[: len(key)].long()
        taken = slots >= 0
        slots, size = slots[taken], keys.shape[2]
        keys[slots // size, :, slots % size] = key[: len(taken)][taken]
        values[slots // size, :, slots % size] = value[: len(taken)][taken]


class InvariantBackend(_base.CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's backend for CPUs, whose layers are `InvariantImpl`."""

    @staticmethod
    def get_impl_cls() -> type[InvariantImpl]:
        """Return the class of a layer's attention."""
        return InvariantImpl


def pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of keys and of values, each [page, G, size, D], of a cache [page, G, size, 2 D]."""
    count, groups, size, _ = kv_cache.shape
    keys, values = kv_cache.view(count, groups, 2, size, -1).unbind(2)
    return keys, values


def gathered(kv_cache: torch.Tensor, table: torch.Tensor, lengths: list[int]) -> KeyBlocks:
    """Return the blocks of the keys and values of S sequences, one behind the other, [S G, m, D].

    table: the pages of each, in order; lengths: its keys. What a page holds behind them is of other sequences.
    """
    of_keys, of_values = pages(kv_cache)
    keys, values = (_gathered(each, table, max(lengths)) for each in (of_keys, of_values))
    count, groups, length, width = values.shape
    behind = torch.arange(length, device=table.device) >= torch.tensor(lengths, device=table.device).unsqueeze(1)
    values.masked_fill_(behind.view(count, 1, length, 1), 0)  # keys that nobody sees have weight 0; 0 times NaN is NaN
    return KeyBlocks(keys.view(count * groups, length, width), values.view(count * groups, length, width))


def _gathered(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first keys of sequences, [S, G, m, D] in fp32: m is the next multiple of `KEYS` from `length` on."""
    _, groups, size, width = cache.shape
    count, padded = table.shape[0], length + -length % KEYS
    used = min(-(-padded // size), table.shape[1])
    blocks = cache.new_zeros(count, groups, padded, width, dtype=torch.float32)
    taken = cache.index_select(0, table[:, :used].reshape(-1).long()).view(count, used, groups, size, width)
    held = min(padded, used * size)
    blocks[:, :, :held] = taken.transpose(1, 2).reshape(count, groups, used * size, width)[:, :, :held]
    return blocks
