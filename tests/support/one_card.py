"""Training in one process, with which a run on several ranks is compared: its losses, and the parts that ranks hold."""

from torch import nn

from ascend_parallel.training.loss import mean_loss


def losses_of(model, optimizer, batches, loss=mean_loss, max_norm=None):
    """Train a step on each batch; return the losses. The gradients of the last step stay."""
    losses = []
    for batch in batches:
        value = loss(model, *batch)
        optimizer.zero_grad()
        value.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(value.item())
    return losses


def box_of(shard):
    """Return the slices of the whole tensor that a rank's part is."""
    return tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.local.shape, strict=True))


def farthest(shards, whole):
    """Return the largest error of a rank's parts against the whole tensors of their names."""
    errors = [(shard.local.double() - whole[name][box_of(shard)].double()).abs() for name, shard in shards.items()]
    return max((error.max().item() for error in errors if error.numel()), default=0.0)
