"""How products are formed and sums over ranks are taken: the library's way, in rank order, or the tree at every degree.

`COC_DETERMINISTIC` chooses one of four objects, `settings.arithmetic`. Layers, norms, losses and plans ask it; none of
them reads the setting. What only one of them does is a method of its class.

LIBRARY       a product is one call of torch, a sum is the backend's: the fastest, and the bits of the plain layer
RANK_ORDER    products in tiles of rows, sums in rank order and in fp32: bits depend on the degree alone
EVERY_DEGREE  products in blocks of the features that ranks share, sums in one tree (blocks.py): bits do not depend on
              the degree either
INVARIANT     the same, with products in tiles of a fixed size (row_tiles.py): a row's bits do not depend on the rows
              beside it either
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from ascend_parallel.ops.blocks import (
    BlockedFeatures,
    degree_tile,
    gradient_of_columns,
    gradient_of_rows,
    product_of_columns,
    sum_of_rows,
)
from ascend_parallel.ops.degree_error import DegreeError, name_in_errors
from ascend_parallel.ops.elementwise import ELEMENTWISE
from ascend_parallel.ops.record import MATMUL, compute
from ascend_parallel.ops.row_tiles import ROWS
from ascend_parallel.ops.rows import deterministic_tile

# The values of the setting `deterministic` that ask for the same bits at every tensor-parallel degree; the second also
# whatever rows are in a call.
TP, ROWS_TOO = "tp", "invariant"
DEPENDS_ON_DEGREE = f"its bits depend on the number of ranks, which COC_DETERMINISTIC={TP} and {ROWS_TOO} forbid"

T = TypeVar("T")
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``product(x_m, dy_m)`` returns ``dy_m.t() @ x_m`` [N, K]: x_m [M, K], dy_m [M, N]."""
RowSum = Callable[[torch.Tensor], torch.Tensor]
"""``row_sum(dy_m)`` returns ``dy_m.sum(0)`` [N]: dy_m [M, N]."""


class Arithmetic:
    """The library's way, and what the others do in its place.

    asked
        The setting with its value, for messages; "" if nothing was asked for.
    kernel
        The kernel that takes a sum, where the usual kernels take it in another way.
    forms_every_product
        Whether the products of layers are formed here also where nothing is communicated or gained: on one rank, of few
        rows, of rows that came gathered. A framework's own product would have other bits.
    sums_shared_rows
        Whether the gradient of a parameter that acts on rows which ranks share, of a norm or a bias, is summed here, in
        blocks of rows (overlap/row_blocks.py). Otherwise that is the framework's business.
    hides_sums
        Whether a sum under its product takes less time than after it, so that plans are chosen for it.
    fixed_tiles
        Whether a row's bits do not depend on the rows beside it: tiles of row_tiles.py.
    priced_as
        The value of the setting `deterministic` whose chunks cost as much.
    """

    asked = ""
    kernel = ""
    forms_every_product = False
    sums_shared_rows = False
    hides_sums = True
    fixed_tiles = False
    priced_as = False

    def row_tile(self, m: int) -> int:
        """Return the rows of a tile of a matmul of `m` rows on all ranks; 0: it is not in tiles."""
        return 0

    def product(self, x: torch.Tensor, w: torch.Tensor, ranks: int, parts: tuple[int, ...] = ()) -> torch.Tensor:
        """Return ``x @ w`` [..., N] of a layer that communicates nothing here: x [..., K], w [K, N].

        The ranks share the columns of w; parts: the columns of each part of a fused weight on this rank.
        """
        return compute(MATMUL, "matmul", torch.matmul, x, w)

    def weight_product(self, kind: str, ranks: int, parts: tuple[int, ...] = ()) -> Product | None:
        """Return the function that multiplies the weight gradient of a "column" or "row" layer; None: torch's."""
        return None

    def bias_sum(self, ranks: int, parts: tuple[int, ...] = ()) -> RowSum | None:
        """Return the function that sums the gradient of a column layer's bias; None: one sum of torch."""
        return None

    def put_in_force(self) -> None:
        """Have torch compute what stands between the layers of this process as this arithmetic needs it."""
        ELEMENTWISE.follow(False)

    def forbids(self, reason: str) -> str | None:
        """Return the reason why something has no sum in the tree, if there has to be one; else None."""
        return None

    def refuse(self, reason: str | Callable[[], str]) -> None:
        """Raise `DegreeError` for the reason why something has no sum in the tree, if there has to be one."""

    def tree_needs(self, *needed: T) -> tuple[T, ...]:
        """Return those of the arguments, such as a check or a patch, that sums in the tree alone need."""
        return ()


class RankOrder(Arithmetic):
    """Products in tiles of rows, sums in rank order."""

    asked = "COC_DETERMINISTIC=1"
    kernel = "ordered"
    priced_as = True

    def row_tile(self, m: int) -> int:
        """Return the rows of a tile, which depend on m alone."""
        return deterministic_tile(m)


class EveryDegree(Arithmetic):
    """Products in blocks of features, sums in the tree."""

    asked = f"COC_DETERMINISTIC={TP}"
    kernel = "tree"
    forms_every_product = True
    sums_shared_rows = True
    hides_sums = False

    def row_tile(self, m: int) -> int:
        """Return the rows of a tile: none has rows of two ranks, at any degree."""
        return degree_tile(m)

    def product(self, x: torch.Tensor, w: torch.Tensor, ranks: int, parts: tuple[int, ...] = ()) -> torch.Tensor:
        """Return the product, one matmul for each block of columns."""
        self.put_in_force()  # the settings may be a caller's own, for this call
        features = BlockedFeatures(parts or (w.shape[1],), ranks, self.fixed_tiles)
        x_m = (x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)).contiguous()
        if features.refusal:
            raise DegreeError(f"a column layer's matmul [{len(x_m)}, {w.shape[0]}, {w.shape[1]}]: {features.refusal}")
        y_m = product_of_columns(x_m, w, row_tile=self.row_tile(len(x_m)), features=features)
        y: torch.Tensor = torch.ops.aten._unsafe_view(y_m, [*x.shape[:-1], w.shape[1]])  # no view: as of `shaped`
        return y

    def weight_product(self, kind: str, ranks: int, parts: tuple[int, ...] = ()) -> Product:
        """Return the function that multiplies the features that ranks share block by block."""
        return functools.partial(gradient_of_rows if kind == "column" else gradient_of_columns, parts, ranks)

    def bias_sum(self, ranks: int, parts: tuple[int, ...] = ()) -> RowSum:
        """Return the function that sums the features that ranks share block by block."""
        return functools.partial(sum_of_rows, parts, ranks)

    def put_in_force(self) -> None:
        """Have elementwise operators compute the last elements as all others (elementwise.py)."""
        ELEMENTWISE.follow(True)
        name_in_errors(self.asked)

    def forbids(self, reason: str) -> str:
        """Return the reason."""
        return reason

    def refuse(self, reason: str | Callable[[], str]) -> None:
        """Raise the error."""
        raise DegreeError(reason if isinstance(reason, str) else reason())

    def tree_needs(self, *needed: T) -> tuple[T, ...]:
        """Return it."""
        return needed


class Invariant(EveryDegree):
    """Products in tiles of a fixed size, sums in the tree."""

    asked = f"COC_DETERMINISTIC={ROWS_TOO}"
    fixed_tiles = True

    def row_tile(self, m: int) -> int:
        """Return the rows of a tile, whatever m."""
        return ROWS


LIBRARY, RANK_ORDER, EVERY_DEGREE, INVARIANT = Arithmetic(), RankOrder(), EveryDegree(), Invariant()
_BY_SETTING: dict[bool | str, Arithmetic] = {False: LIBRARY, True: RANK_ORDER, TP: EVERY_DEGREE, ROWS_TOO: INVARIANT}


def arithmetic_of(deterministic: bool | str) -> Arithmetic:
    """Return the arithmetic of the setting `deterministic`: False, True, `TP` or `ROWS_TOO`."""
    return _BY_SETTING[deterministic]
