"""Operators on each sample, whose batch is sharded at least: recurrent layers, Fourier transforms, distances."""

from __future__ import annotations

from ascend_parallel.sharding.graph import OpCall, Ref
from ascend_parallel.sharding.rules.axes import (
    Axis,
    arguments,
    cut,
    draws,
    linear_in_all,
    normal,
    other_dims,
    place,
    same,
)
from ascend_parallel.sharding.rules.reductions import leading
from ascend_parallel.sharding.rules.registry import OpPlacements, register_all

RECURRENT = "lstm.input gru.input rnn_tanh.input rnn_relu.input"
FOURIER = """
    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn
    fft_rfftn fft_irfftn
"""
WHOLE_CHANNELS = "feature_dropout feature_alpha_dropout"


def recurrent(call: OpCall) -> list[OpPlacements]:
    """LSTM, GRU, RNN: shard the batch of the sequences and of the states [layers, batch, hidden]; weights partial_grad.

    With dropout between layers nothing is sharded: its random numbers are the operator's own.
    """
    named = arguments(call)
    sequences, states = place(named["input"]), named["hx"]
    assert sequences is not None
    if len(call.inputs[sequences].shape) != 3 or (named["dropout"] and named["train"]):
        return []
    batch = 0 if named["batch_first"] else 1
    of_states = {state.index for state in (states if isinstance(states, (list, tuple)) else [states])}
    dims = [batch if at == sequences else 1 if at in of_states else None for at in range(len(call.inputs))]
    return cut(call, [Axis(tuple(dims), (batch, *(1 for _ in call.outputs[1:])))])


def transformed(call: OpCall) -> list[OpPlacements]:
    """Fourier transforms: shard a dimension that is not transformed; linear."""
    named = arguments(call)
    along, lengths = named.get("dim"), named.get("s")
    if along is None:
        along = range(len(call.inputs[0].shape)) if lengths is None else range(-len(lengths), 0)
    own = [along] if isinstance(along, int) else along
    return cut(call, same(call, other_dims(call, *own))) + linear_in_all(call)


def prelu(call: OpCall) -> list[OpPlacements]:
    """PReLU: shard any dimension; a weight of several channels is sharded with the channels."""
    several = call.inputs[1].shape[0] > 1
    dims = range(len(call.inputs[0].shape))
    return cut(call, [Axis((dim, 0 if several and dim == 1 else None), (dim,)) for dim in dims])


def weight_norm(call: OpCall) -> list[OpPlacements]:
    """Weight norm: shard the dimension that keeps its norms."""
    dim = arguments(call)["dim"]
    return cut(call, [Axis((dim, dim), (dim,))]) if dim >= 0 else []


def written(call: OpCall) -> list[OpPlacements]:
    """slice_scatter, select_scatter: shard a dimension along which nothing is selected; jointly linear."""
    named, dims = arguments(call), len(call.inputs[0].shape)
    if place(named["self"]) != 0 or place(named["src"]) != 1:
        return []
    dim, selects = normal(named["dim"], dims), len(call.inputs[1].shape) < dims
    axes = [Axis((each, each - (selects and each > dim)), (each,)) for each in other_dims(call, dim)]
    return cut(call, axes) + linear_in_all(call)


def windows(call: OpCall) -> list[OpPlacements]:
    """Tensor.unfold: shard a dimension without windows; linear."""
    return cut(call, same(call, other_dims(call, arguments(call)["dimension"]))) + linear_in_all(call)


def sampled(call: OpCall) -> list[OpPlacements]:
    """grid_sampler: shard the batch of images and grids."""
    return cut(call, same(call, [0], inputs=2))


def spectrogram(call: OpCall) -> list[OpPlacements]:
    """STFT: shard the batch of the signals [B, L]; a single signal [L] stays whole."""
    return cut(call, same(call, [0], inputs=1)) if len(call.inputs[0].shape) == 2 else []


def distances(call: OpCall) -> list[OpPlacements]:
    """Distances of rows x1 [..., P, M] and x2 [..., R, M]: shard the batch, the rows of x1, or those of x2."""
    first, second = (len(meta.shape) for meta in call.inputs)
    shapes = [meta.shape[:-2] for meta in call.inputs]
    batch = range(first - 2) if shapes[0] == shapes[1] else ()
    out = len(call.outputs[0].shape)
    rows = [Axis((first - 2, None), (out - 2,)), Axis((None, second - 2), (out - 1,))]
    return cut(call, [*(Axis((dim, dim), (dim,)) for dim in batch), *rows])


def similarity(call: OpCall) -> list[OpPlacements]:
    """Cosine similarity of tensors of one shape: shard another dimension than the compared one."""
    if len(call.inputs) != 2 or call.inputs[0].shape != call.inputs[1].shape:
        return []
    own = normal(arguments(call)["dim"], len(call.inputs[0].shape))
    return cut(call, [Axis((dim, dim), (dim - (dim > own),)) for dim in other_dims(call, own)])


def bilinear(call: OpCall) -> list[OpPlacements]:
    """x1 A x2 + b: shard a dimension before the features; weight and bias partial_grad."""
    return cut(call, same(call, range(len(call.inputs[0].shape) - 1), inputs=2))


def of_elements(call: OpCall) -> list[OpPlacements]:
    """bucketize: shard the values, the boundaries whole."""
    if not isinstance(arguments(call)["self"], Ref):
        return []
    return cut(call, same(call, range(len(call.inputs[0].shape)), inputs=1))


def channels_dropped(call: OpCall) -> list[OpPlacements]:
    """Dropout of whole channels: shard samples or channels; without dropout any dimension."""
    dims = range(len(call.inputs[0].shape))
    return cut(call, same(call, dims[:2] if draws(call) else dims))


def register() -> None:
    """Register this file's rules."""
    register_all(RECURRENT, recurrent)
    register_all(FOURIER, transformed)
    register_all("view_as_complex view_as_real", leading(0, linear=True))
    register_all("prelu _prelu_kernel", prelu)
    register_all("_weight_norm", weight_norm)
    register_all("slice_scatter select_scatter", written)
    register_all("pixel_shuffle pixel_unshuffle channel_shuffle", leading(3, linear=True))
    register_all("im2col col2im", leading(2, linear=True))
    register_all("unfold", windows)
    register_all("grid_sampler grid_sampler_2d grid_sampler_3d", sampled)
    register_all("stft", spectrogram)
    register_all("cdist", distances)
    register_all("cosine_similarity", similarity)
    register_all("bilinear", bilinear)
    register_all("bucketize.Tensor", of_elements)
    register_all(WHOLE_CHANNELS, channels_dropped)
