"""A column and a row layer under MindSpeed, compared with unsharded layers in float64: outputs and every gradient."""

import torch
import torch.distributed as dist

K, WIDTH, ROWS, BATCH = 1024, 1536, 128, 2


def pair():
    """Build a column and a row layer as the framework would: by name, with the configuration of the arguments."""
    from megatron.core.tensor_parallel import layers
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.global_vars import get_args

    shared = {"config": core_transformer_config_from_args(get_args()), "init_method": torch.nn.init.xavier_normal_}
    column = layers.ColumnParallelLinear(K, WIDTH, gather_output=False, bias=True, **shared)
    row = layers.RowParallelLinear(WIDTH, K, input_is_parallel=True, bias=True, skip_bias_add=False, **shared)
    return torch.nn.ModuleDict({"column": column, "row": row})


def gathered(part, dim):
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts, dim)


def share(whole, dim):
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def compare(model, weights=None, norm=None):
    """Run forward and backward of the pair, and compare both with float64; return what differs.

    weights  the whole weights of column and row that the layers should have used, if not their parameters
    norm     the function of x and the norm's parameters that comes first
    """
    column, row = model["column"], model["row"]
    sequence, device = row.sequence_parallel, row.weight.device
    generator = torch.Generator().manual_seed(3)
    x_m, dz_m = (torch.randn((ROWS, BATCH, K), generator=generator) for _ in range(2))
    with torch.no_grad():
        for index, bias in enumerate((column.bias, row.bias)):
            bias.copy_(torch.randn(bias.shape, generator=generator.manual_seed(4 + index)))  # equal on all ranks
    x = (share(x_m, 0) if sequence else x_m).clone().to(device).requires_grad_()
    z = row(column(x)[0])[0]
    z.backward((share(dz_m, 0) if sequence else dz_m).to(device))

    wholes = weights or (gathered(column.weight, 0), gathered(row.weight, 1))
    norms = [p.detach() for name, p in column.named_parameters() if name.startswith("layer_norm")]
    operands = [x_m, wholes[0], gathered(column.bias, 0), wholes[1], row.bias.detach(), *norms]
    x64, w1, b1, w2, b2, *n64 = (operand.cpu().double().clone().requires_grad_() for operand in operands)
    z64 = ((norm(x64, *n64) if norm else x64) @ w1.t() + b1) @ w2.t() + b2
    z64.backward(dz_m.double())
    rows = (lambda whole: share(whole, 0)) if sequence else (lambda whole: whole)
    found = {"z": (z, rows(z64)), "dx": (x.grad, rows(x64.grad))}
    found |= {"dw1": (column.weight.grad, share(w1.grad, 0)), "db1": (column.bias.grad, share(b1.grad, 0))}
    found |= {"dw2": (row.weight.grad, share(w2.grad, 1))}
    replicated = [("db2", row.bias, b2)]
    replicated += list(
        zip(("dgamma", "dbeta"), (p for n, p in column.named_parameters() if "layer_norm" in n), n64, strict=False)
    )
    for name, parameter, truth in replicated:
        grad = parameter.grad.clone()
        if sequence:  # of this rank's rows alone; Megatron sums these gradients after the backward
            dist.all_reduce(grad)
        found[name] = grad, truth.grad
    return [name for name, (got, truth) in found.items() if not close(got, truth)]


def close(got, truth):
    return (got.cpu().double() - truth).abs().max().item() <= 2e-5 * truth.abs().max().item()
