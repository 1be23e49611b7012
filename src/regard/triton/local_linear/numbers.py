"""The numbers of a call of local linear attention."""

from typing import NamedTuple


class Numbers(NamedTuple):
    """The arguments of a call that are not tensors."""

    factor: float  # if it is a number
    ridge: float  # if it is a number
    tol: float  # relative residual of a solution
    limit: int  # maximum steps of a row
    direct: bool  # whether rows with few keys are solved directly
    verify: bool  # whether true residuals are computed instead of those that the steps carry along
    given: bool  # whether t is given
    counted: bool = False  # whether weights are counted
