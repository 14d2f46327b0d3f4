"""Flash attention, computed whole: scores of all queries and keys in fp32."""

from typing import Any

import torch

from .random import unpacked
from .table import kernel, store

Tensor = torch.Tensor


def by_heads(x: Tensor, layout: str, heads: int) -> Tensor:
    """View [B, N, S, D] of a tensor in one of the layouts BSH, SBH, BSND, BNSD."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    split = x.reshape(*x.shape[:2], heads, -1)
    if layout == "BSH":
        return split.transpose(1, 2)
    if layout == "SBH":
        return split.permute(1, 2, 0, 3)
    raise NotImplementedError(f"flash attention of layout {layout}")


def from_heads(x: Tensor, layout: str) -> Tensor:
    """Undo `by_heads`."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    return (x.transpose(1, 2) if layout == "BSH" else x.permute(2, 0, 1, 3)).flatten(2)


def hidden(mask: Any, mode: int, queries: int, keys: int, before: int, after: int) -> Tensor | None:
    """Return where a query does not see a key, by the mask and the sparse mode."""
    row, column = torch.arange(queries)[:, None], torch.arange(keys)
    if mode == 0:
        outside = (column < row - before) | (column > row + after)
        if mask is None or not mask.numel():
            return outside if outside.any() else None
        return mask.bool() | outside
    if mode == 1:
        return mask.bool()
    if mode == 2:
        return column > row
    if mode == 3:
        return column > row + keys - queries
    if mode == 4:
        at = row + keys - queries
        return (column < at - before) | (column > at + after)
    raise NotImplementedError(f"flash attention of sparse mode {mode}")


class Attention:
    """One call's scores and probabilities, [B, N, Sq, Sk]."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Any, dropped: Any, mask: Any, scale: float, keep: float,
        before: int, after: int, heads: int, layout: str, mode: int,
    ) -> None:  # fmt: skip
        self.layout, self.keep, self.scale = layout, keep, scale
        self.q = by_heads(query, layout, heads).float()
        few = (
            heads * key.shape[-1] // query.shape[-1]
            if layout in ("BSH", "SBH")
            else key.shape[2 if layout == "BSND" else 1]
        )
        self.few, self.times = few, heads // few
        self.k, self.v = (
            by_heads(x, layout, few).float().repeat_interleave(self.times, 1) for x in (key, value)
        )  # fmt: skip
        scores = self.q @ self.k.transpose(-1, -2) * scale
        if bias is not None and bias.numel():
            scores = scores + bias.float()
        unseen = hidden(mask, mode, scores.shape[-2], scores.shape[-1], before, after)
        if unseen is not None:
            scores = scores.masked_fill(unseen, float("-inf"))
        self.most = scores.amax(-1, True).clamp_min(torch.finfo(torch.float32).min)
        powers = torch.exp(scores - self.most)
        self.sum = powers.sum(-1, True)
        self.p = powers / self.sum.clamp_min(torch.finfo(torch.float32).tiny)
        kept = (
            None
            if dropped is None or not dropped.numel() or keep >= 1
            else unpacked(dropped, scores.numel()).reshape(scores.shape)
        )
        self.factor = 1.0 if kept is None else kept / keep

    def output(self) -> Tensor:
        """Return the weighted values in the call's layout."""
        return from_heads((self.p * self.factor) @ self.v, self.layout)

    def gradients(self, grad: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of query, key, value, and of the scores."""
        g = by_heads(grad, self.layout, heads).float()
        dv = (self.p * self.factor).transpose(-1, -2) @ g
        dp = (g @ self.v.transpose(-1, -2)) * self.factor
        ds = self.p * (dp - (dp * self.p).sum(-1, True))
        dq, dk = ds @ self.k * self.scale, ds.transpose(-1, -2) @ self.q * self.scale
        few = [x.unflatten(1, (self.few, self.times)).sum(2) for x in (dk, dv)]
        return (*(from_heads(x, self.layout) for x in (dq, *few)), ds)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, dropped: Any, padding: Any, mask: Any, scale: float, keep: float,
    before: int, after: int, heads: int, layout: str, precise: int, mode: int, *outs: Tensor,
) -> None:  # fmt: skip
    """Write maxima, sums, an empty tensor, the output."""
    done = Attention(q, k, v, bias, dropped, mask, scale, keep, before, after, heads, layout, mode)
    most, total, _, out = outs
    most.copy_(done.most.expand(most.shape))
    total.copy_(done.sum.expand(total.shape))
    out.copy_(done.output())


def backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Any, dropped: Any, padding: Any, mask: Any, most: Any,
    total: Any, probabilities: Any, out: Any, scale: float, keep: float, before: int, after: int, heads: int,
    layout: str, precise: int, mode: int, *outs: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of query, key, value and bias."""
    done = Attention(q, k, v, bias, dropped, mask, scale, keep, before, after, heads, layout, mode)
    store(outs, done.gradients(grad, heads))


def without(count: int, start: int, function: Any) -> Any:
    """Leave out `count` arguments from `start` on: prefixes and offsets, of which these layouts make no use."""
    return lambda *given: function(*given[:start], *given[start + count :])


def without_type(start: int, position: int, function: Any) -> Any:
    """Leave out prefix and offsets from `start` on, and the type of the bias at `position`, which has to be 1."""

    def run(*given: Any) -> None:
        if given[position] != 1:
            raise NotImplementedError(f"flash attention of pse_type {given[position]}")
        function(*given[:start], *given[start + 3 : position], *given[position + 1 :])

    return run


kernel("FlashAttentionScore", "ttt oooo p ddiiiciitttt", without(1, 7, forward))
kernel("FlashAttentionScoreV2", "ttt oooo ppp ddiiiciiitttt", without_type(7, 18, forward))
kernel("FlashAttentionScoreGrad", "tttt oooo oooo p ddiiiciitttt", without(1, 12, backward))
kernel("FlashAttentionScoreGradV2", "tttt oooo oooo ppp ddiiiciiitttt", without_type(12, 23, backward))
