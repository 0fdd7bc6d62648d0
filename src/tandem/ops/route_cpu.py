"""Records the router of a mixture of experts: the argument struct of route.cpp."""

import ctypes

import numpy as np

from tandem.errors import ShapeError
from tandem.ops.base import Routing, Weight
from tandem.ops.program import Buffer, Program
from tandem.ops.weights_cpu import float_address, product_scale


class RouteArgs(ctypes.Structure):
    """Mirror of RouteArgs in route.cpp."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("router", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


def record_route(program: Program, x: Buffer, router: Weight, k: int) -> Routing:
    """`Ops.route`. Raises ShapeError if the router does not fit x or has fewer than k experts."""
    experts, width = router.shape
    if width != x.width or not 0 < k <= experts:
        raise ShapeError(f"{router.name}: shape {router.shape}, route needs ({k} or more, {x.width})")
    ids, weights, logits = program.buffer(k, np.int32), program.buffer(k), program.buffer(experts)
    args = RouteArgs(
        router=float_address(program, router, experts, width),
        width=width,
        experts=experts,
        k=k,
        scale=product_scale(router),
    )
    program.call("route", args, x=x, logits=logits, ids=ids, weights=weights)
    return Routing(ids, weights, k)
