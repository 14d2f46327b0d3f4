"""Recurrent layers, Fourier transforms, resampling and distances, and how to draw their arguments."""

import torch
from rule_drawing import case

aten = torch.ops.aten


def recurrent(d, gates, states, batch_first, batched=True):
    """Two layers of hidden size 4 on sequences of 3 features."""
    batch, length, features, hidden = d.size(), d.size(), 3, 4
    weights = []
    for width in (features, hidden):
        shapes = (gates * hidden, width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)
        weights += [d.float(*shape) for shape in shapes]
    x = d.float(*((batch, length) if batch_first else (length, batch)), features)
    given = [d.float(2, batch, hidden) for _ in range(states)]
    return x, given if states == 2 else given[0], weights, True, 2, 0.0, True, False, batch_first


def sample_cases():
    for batch_first in (True, False):
        name = "batch first" if batch_first else None
        case(aten.lstm.input, lambda d, first=batch_first: recurrent(d, 4, 2, first), 1, name)
        case(aten.gru.input, lambda d, first=batch_first: recurrent(d, 3, 1, first), 1, name)
    case(aten.rnn_tanh.input, lambda d: recurrent(d, 1, 1, True), 1)
    case(aten.prelu.default, lambda d: (d.float(*d.sizes(3)), d.float(1)), 3)
    case(aten.prelu.default, lambda d: (d.float(d.size(), 6, d.size()), d.float(6)), 3, "channels")
    case(aten._weight_norm.default, lambda d: (d.float(6, 3), d.positive(6, 1), 0), 1)
    case(aten.slice_scatter.default, lambda d: (d.float(*(s := d.sizes(2)), 6), d.float(*s, 2), 2, 1, 5, 2), 4)
    case(aten.select_scatter.default, lambda d: (d.float(s := d.size(), 3, t := d.size()), d.float(s, t), 1, 2), 4)


def transform_cases():
    def signals(d):
        return d.float(*d.sizes(2), 6)

    case(aten.fft_rfft.default, lambda d: (signals(d),), 4)
    case(aten.fft_fft.default, lambda d: (torch.complex(x := signals(d), x.flip(0)),), 4)
    case(aten.fft_irfft.default, lambda d: (torch.complex(x := d.float(d.size(), 3, 6), x.flip(0)), None, 1), 4)
    case(aten.fft_fftn.default, lambda d: (torch.complex(x := signals(d), x.flip(0)), None, [1, 2]), 3)
    case(aten.fft_fftn.default, lambda d: (torch.complex(x := signals(d), x.flip(0)), [6, 6]), 3, "lengths")
    case(aten.view_as_complex.default, lambda d: (d.float(*d.sizes(2), 2),), 4)
    case(aten.view_as_real.default, lambda d: (torch.complex(x := signals(d), x.flip(0)),), 5)
    case(
        aten.stft.default,
        lambda d: (d.float(d.size(), 32), 8, None, 8, d.positive(8), False, True, True),
        1,
        constants=(1,),
    )
    case(aten.pixel_shuffle.default, lambda d: (d.float(d.size(), d.size(), 4, 3, 3), 2), 4)
    case(aten.im2col.default, lambda d: (d.float(d.size(), 3, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]), 3)
    case(aten.unfold.default, lambda d: (d.float(*d.sizes(2), 6), 2, 4, 2), 4)
    case(
        aten.grid_sampler.default,
        lambda d: (d.float(n := d.size(), 3, 4, 4), d.positive(n, 5, 5, 2), 0, 0, False),
        1,
    )
    case(aten.cdist.default, lambda d: (d.float(n := d.size(), d.size(), 4), d.float(n, d.size(), 4)), 3)
    case(aten.cosine_similarity.default, lambda d: (d.float(*(s := d.sizes(2)), 4), d.float(*s, 4), 2), 2)
    case(
        aten.bilinear.default,
        lambda d: (d.float(*(s := d.sizes(2)), 3), d.float(*s, 4), d.float(5, 3, 4), d.float(5)),
        2,
    )
    case(
        aten.bucketize.Tensor, lambda d: (d.float(*d.sizes(2)), torch.linspace(-1, 1, 5).double()), 2, constants=(0, 1)
    )
    case(aten.nanmean.default, lambda d: (d.float(*d.sizes(3)), [1]), 2)
    case(aten.feature_dropout.default, lambda d: (d.float(*d.sizes(3)), 0.5, False), 3)


sample_cases()
transform_cases()
