"""Random numbers and dropout: the same seed and offset give the same numbers, which are not those of a card."""

import torch

from .table import kernel

Tensor = torch.Tensor


def generator(seed: int, offset: int) -> torch.Generator:
    """Return a generator of this seed and offset."""
    return torch.Generator().manual_seed((seed * 1_000_003 + offset * 7919 + 12345) % (1 << 63))


def draw(into: Tensor, seed: int, offset: int, method: str, *given: float) -> None:
    """Fill a tensor by a method of torch's."""
    values = torch.empty(into.shape, dtype=into.dtype)
    into.copy_(getattr(values, method)(*given, generator=generator(seed, offset)))


kernel("InplaceNormal", "tffii", lambda into, mean, deviation, *seeds: draw(into, *seeds, "normal_", mean, deviation))
kernel("InplaceUniform", "tddii", lambda into, low, high, *seeds: draw(into, *seeds, "uniform_", low, high))
kernel("InplaceRandom", "tiiii", lambda into, low, high, *seeds: draw(into, *seeds, "random_", low, high))
kernel("InplaceRandomWithoutFromTo", "tii", lambda into, *seeds: draw(into, *seeds, "random_"))
kernel("InplaceBernoulli", "tsii", lambda into, p, *seeds: draw(into, *seeds, "bernoulli_", p))
kernel(
    "InplaceBernoulliTensor", "ttii",
    lambda into, p, *seeds: into.copy_(torch.bernoulli(p.float().expand(into.shape), generator=generator(*seeds))),
)  # fmt: skip
kernel("Randperm", "iiit", lambda n, seed, offset, out: out.copy_(torch.randperm(n, generator=generator(seed, offset))))
kernel(
    "Multinomial", "tibiit",
    lambda p, n, again, seed, offset, out: out.copy_(torch.multinomial(p, n, again, generator=generator(seed, offset))),
)  # fmt: skip
kernel(
    "NormalFloatFloat",
    "ffiit",
    lambda mean, deviation, seed, offset, out: draw(out, seed, offset, "normal_", mean, deviation),
)
kernel(
    "NormalTensorFloat", "tfiit",
    lambda mean, deviation, seed, offset, out: (draw(out, seed, offset, "normal_", 0.0, deviation), out.add_(mean)),
)  # fmt: skip


def packed(keeps: Tensor, mask: Tensor) -> None:
    """Write bits, the lowest first, as the mask of a dropout has them."""
    bits = torch.zeros(mask.numel() * 8, dtype=torch.uint8)
    bits[: keeps.numel()] = keeps.reshape(-1)
    weights = 2 ** torch.arange(8, dtype=torch.int32)
    mask.reshape(-1).copy_((bits.reshape(-1, 8).int() * weights).sum(-1).to(torch.uint8))


def unpacked(mask: Tensor, count: int) -> Tensor:
    """Read `count` bits."""
    return ((mask.reshape(-1)[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).reshape(-1)[:count].bool()


def drawn_mask(shape: tuple[int, ...], p: float, seed: int, offset: int, mask: Tensor) -> None:
    """Write a mask that keeps an element with probability 1 - p."""
    count = 1
    for size in shape:
        count *= size
    packed(torch.rand(count, generator=generator(seed, offset)) >= p, mask)


kernel("DropoutGenMask", "Idiit", drawn_mask)
kernel(
    "DropoutGenMaskV2", "Idiiit", lambda shape, p, seed, offset, dtype, mask: drawn_mask(shape, p, seed, offset, mask)
)


def dropped(x: Tensor, mask: Tensor, p: float, out: Tensor) -> None:
    """Zero what the mask does not keep, scale the rest."""
    keeps = unpacked(mask, x.numel()).reshape(x.shape)
    out.copy_(torch.where(keeps, x.float() / (1 - p) if p < 1 else 0.0, 0.0))


kernel("DropoutDoMask", "ttdt", dropped)


def dropout(x: Tensor, noise: object, p: float, seed: int, offset: int, out: Tensor, mask: Tensor) -> None:
    """Draw a mask and apply it."""
    drawn_mask(tuple(x.shape), p, seed, offset, mask)
    dropped(x, mask, p, out)


kernel("DropoutV3", "todiitt", dropout)
