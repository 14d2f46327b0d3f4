"""torch_npu's fused operators in plain torch, as their pages describe them: CPU kernels under the wheel's schemas.

Registered after a model is traced, so that the trace has the operators themselves, with the wheel's meta kernels.
"""

import torch
import torch.nn.functional as F
from grouped_experts import grouped_mm, grouped_mm_of_rows


def knows_the_chip():
    """The meta kernels ask which chip there is, for a warning; there is none."""
    from torch_npu.op_plugin.meta import _meta_registrations as meta

    meta.get_soc_version = lambda: 220


def register():
    """Register the kernels below, and return the library that keeps them."""
    library = torch.library.Library("npu", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "AutogradCPU")
        library.impl(name, kernel, "CPU")
    return library


def fusion_attention(*args, **named):
    names = [argument.name for argument in torch.ops.npu.npu_fusion_attention.default._schema.arguments]
    return attend(**dict(zip(names, args, strict=False)), **named)


def attend(query, key, value, head_num, input_layout, pse=None, atten_mask=None, scale=1.0, sink=None, **more):
    assert more.get("padding_mask") is None and more.get("keep_prob", 1.0) == 1.0, "not in these tests"
    if input_layout == "TND":  # sequences of a batch, one after the other
        ends = more["actual_seq_qlen"]
        starts = [0, *ends[:-1]]
        parts = [
            attend(*(t[start:stop][None] for t in (query, key, value)), head_num, "BSND", scale=scale)
            for start, stop in zip(starts, ends, strict=True)
        ]
        sums = [torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in (1, 2)]
        return torch.cat([part[0][0] for part in parts]), *sums, parts[0][3], 0, 0, 0
    q, k, v = (apart(t, input_layout, query, head_num, t is value and key) for t in (query, key, value))
    assert q.shape[1] == head_num, f"head_num {head_num} of {tuple(q.shape)}"
    k, v = (t.repeat_interleave(head_num // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * scale
    scores = scores if pse is None else scores + pse
    scores = scores if atten_mask is None else scores.masked_fill(atten_mask.bool(), -1e4)
    exponents = (scores - (top := scores.detach().amax(-1, keepdim=True))).exp()
    total = exponents.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink.view(1, -1, 1, 1) - top).exp()
    y = exponents / total @ v
    if input_layout in ("BSH", "SBH"):
        y = y.transpose(1, 2).flatten(2)
        y = y if input_layout == "BSH" else y.transpose(0, 1)
    elif input_layout == "BSND":
        y = y.transpose(1, 2)
    sums = (t.detach().float().expand(*t.shape[:-1], 8) for t in (top, total))
    return y, *sums, y.new_empty(0), 0, 0, 0


def apart(tensor, layout, query, head_num, key):
    """Return a tensor as [B, N, S, D]."""
    if layout == "SBH":
        tensor = tensor.transpose(0, 1)
    if layout in ("BSH", "SBH"):
        width = query.shape[-1] // head_num
        heads = (key.shape[-1] if key is not False else tensor.shape[-1]) // width
        tensor = tensor.unflatten(-1, (heads, -1)).transpose(1, 2)
    return tensor.transpose(1, 2) if layout == "BSND" else tensor


def rms_norm(x, gamma, epsilon=1e-6):
    dims = tuple(range(-gamma.dim(), 0))
    rstd = (x.pow(2).mean(dims, keepdim=True) + epsilon).rsqrt()
    return x * rstd * gamma, rstd.detach().float()


def add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    y, rstd = rms_norm(x1 + x2, gamma, epsilon)
    return y, rstd, x1 + x2


def rotary_mul(x, r1, r2, rotary_mode="half", rotate=None):
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1) if rotate is None else x @ rotate
    return x * r1 + turned * r2


def apply_rotary_pos_emb(query, key, cos, sin, layout="BSND", rotary_mode="half"):
    return rotary_mul(query, cos, sin), rotary_mul(key, cos, sin)


def swiglu(x, dim=-1):
    gate, up = x.chunk(2, dim)
    return F.silu(gate) * up


def geglu(x, dim=-1, approximate=1, activate_left=False):
    left, right = x.chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    gelu = F.gelu(gate, approximate="tanh" if approximate else "none")
    return gelu * up, gelu


def scaled_masked_softmax(x, mask, scale=1, fixed_triu_mask=False):
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return (x * scale).masked_fill(mask, -1e4).softmax(-1)


def grouped_matmul(x, weight, *, group_list, split_item, group_type, group_list_type=0, **more):
    """Rows of x [M, K], grouped, times a weight [K, N] for each group; or with type 2 products of grouped columns."""
    assert split_item in (2, 3) and all(value is None for value in more.values()), (split_item, more)
    (x,), counts = x, group_list if group_list_type == 1 else group_list.diff(prepend=group_list.new_zeros(1))
    assert counts.dtype == torch.int64, counts.dtype
    if group_type == 2:
        return [grouped_mm_of_rows(x.t(), weight[0], counts.tolist())]
    return [grouped_mm(x, torch.stack(list(weight)), counts.tolist())]


KERNELS = {
    "npu_grouped_matmul": grouped_matmul,
    "npu_fusion_attention": fusion_attention,
    "npu_fusion_attention_v2": fusion_attention,
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_apply_rotary_pos_emb": apply_rotary_pos_emb,
    "npu_swiglu": swiglu,
    "npu_geglu": geglu,
    "npu_gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "npu_fast_gelu": lambda x: F.gelu(x, approximate="tanh"),
    "npu_silu": F.silu,
    "npu_mish": F.mish,
    "npu_dtype_cast": lambda x, dtype, input_dtype=None: x.to({6: torch.float32, 7: torch.float64}[dtype]),
    "npu_scaled_masked_softmax": scaled_masked_softmax,
    "npu_linear": F.linear,
    "npu_bmmV2": lambda x, y, output_sizes: x @ y,
}
