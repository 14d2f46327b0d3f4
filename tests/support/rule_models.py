"""Small models whose operators, as they are traced, are run in parts: Llama-, BERT- and ResNet-like."""

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def turned(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), -1)


class Llama(nn.Module):
    """Grouped queries, both ways to repeat keys; tied embedding; cross-entropy."""

    def __init__(self, width=8, heads=4, groups=2, length=4, words=12):
        super().__init__()
        self.heads, self.groups, self.words, size = heads, groups, words, width // heads
        self.embedding, self.norm, self.norm_after = nn.Embedding(words, width), Norm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, n * size) for n in (heads, groups, groups, heads))
        self.gate, self.up, self.down = nn.Linear(width, 12), nn.Linear(width, 12, bias=False), nn.Linear(12, width)
        angles = torch.arange(length)[:, None] * torch.rand(size)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids, target):
        x = self.embedding(ids)
        batch, length, width = x.shape
        h = self.norm(x)
        q, k, v = (
            one(h).view(batch, length, -1, width // self.heads).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        cos, sin = self.cos[:length].unsqueeze(0), self.sin[:length]
        q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
        repeat = self.heads // self.groups
        k = k[:, :, None].expand(batch, self.groups, repeat, length, -1).reshape(q.shape)
        a = F.scaled_dot_product_attention(q, k, v.repeat_interleave(repeat, 1), is_causal=True)
        x = x + self.out(a.transpose(1, 2).contiguous().view(batch, length, width))
        h = self.norm_after(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        logits = F.linear(x, self.embedding.weight)
        return F.cross_entropy(logits.view(-1, self.words), target.view(-1))


class Bert(nn.Module):
    """Attention written out with a mask, and torch's own encoder layer."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads, self.qkv, self.norm = heads, nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.layer, self.pool = nn.TransformerEncoderLayer(width, heads, 12, batch_first=True), nn.Linear(width, width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = (one.view(batch, length, self.heads, -1).permute(0, 2, 1, 3) for one in self.qkv(x).split(width, -1))
        weights = torch.matmul(q, k.transpose(-1, -2)) / 2.0
        weights = weights.masked_fill(mask[:, None, None] == 0, -1e4).softmax(-1)
        x = self.norm(x + torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, width))
        x = F.gelu(self.layer(x), approximate="tanh")
        return torch.where(mask[..., None] == 0, torch.zeros_like(x), x), torch.tanh(self.pool(x[:, 0]))


class Block(nn.Module):
    """Convolutions, batch norm (traced in place), pooling, a classifier."""

    def __init__(self, channels=4):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(2, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(True)
        self.deep = nn.Conv2d(channels, channels, 3, padding="same", groups=channels)
        self.classify = nn.Linear(channels, 6)

    def forward(self, x):
        x = F.max_pool2d(self.relu(self.norm(self.conv(x))), 2)
        x = F.adaptive_avg_pool2d(x + self.deep(x), 1)
        return self.classify(torch.flatten(x, 1)).log_softmax(-1).mean()


def made(name):
    """Return a model in float64 and its inputs."""
    torch.manual_seed(2)
    ids = torch.randint(12, (2, 4))
    if name == "Llama":
        return Llama().double(), (ids, ids.flip(0))
    if name == "Bert":
        return Bert().double().eval(), (torch.randn(2, 4, 8).double(), torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]]))
    return Block().double().train(name.endswith("training")), (torch.randn(2, 2, 4, 4).double(),)
