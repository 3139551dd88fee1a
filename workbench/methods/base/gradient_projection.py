"""Gradient projection: the nearest vector without conflict with given gradients (GEM)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.matching.gram import Vector, combine, gram
from stamp_core.matching.simplex import Array, coordinates, least_distance
from stamp_core.methods.base.method import Log
from stamp_core.models.flat import flatten_like
from stamp_core.models.networks import set_train_mode

RESIDUAL = 1e-6  # up to which a program counts as solved; of vectors of norm 1
NOT_FINITE, NOT_SOLVED = "not finite", "not solved"
_RESOLUTIONS = (1e-7, 1e-6, 1e-5, 1e-4)  # of gradients known by their Gram matrix


@dataclass(frozen=True)
class Projection:
    """The difference between the projected vector and the vector."""

    added: Tensor | None  # float64 [P]; None where there is no conflict
    troubles: tuple[str, ...] = ()  # why some blocks were not projected


@dataclass(frozen=True)
class ProgramMinimum:
    """The minimiser of a quadratic program, or the best point that the solver reached."""

    v: Array  # [K]
    residual: float = 0.0
    trouble: str = ""


def project_gradient(
    vector: Tensor,
    gradients: Sequence[Vector],
    sizes: Sequence[int] | None = None,
    *,
    rho: float = 0.0,
    ridge: float = 0.0,
    margin: float = 0.0,
) -> Projection:
    """What to add to the vector so that <g_k, result> >= rho |g_k| |vector| in every block.

    It is sum_k v_k g_k with v = argmin 0.5 v'(A + ridge) v + b'v over v >= margin, where A is the
    Gram matrix of the gradients and b_k = <g_k, vector> - rho |g_k| |vector|; nothing if all
    b >= 0. The sum is in float64: nearly opposite gradients get large multipliers v, with which
    the rounding of float32 would dominate the result.
    """
    grams = gram([*gradients, vector], sizes).numpy()  # [L, K + 1, K + 1]
    minima = [_project_block(block, rho, ridge, margin) for block in grams]
    v = torch.from_numpy(np.stack([each.v for each in minima]))  # [L, K]
    added = combine(gradients, v, sizes, torch.float64) if v.any() else None
    troubles = tuple(sorted({each.trouble for each in minima if each.trouble}))
    return Projection(added, troubles)


def _project_block(gram: Array, rho: float, ridge: float, margin: float) -> ProgramMinimum:
    """The v of the gradients; the last row of the Gram matrix is the vector's."""
    zeros = np.zeros(len(gram) - 1)
    if not np.isfinite(gram).all():
        return ProgramMinimum(zeros, trouble=NOT_FINITE)
    norms = np.sqrt(gram.diagonal())
    norms, size = norms[:-1], float(norms[-1])
    linear = np.where(norms > 0, gram[:-1, -1] - rho * size * norms, 0.0)
    if (linear >= 0).all():
        return ProgramMinimum(zeros)
    matrix = gram[:-1, :-1] + ridge * np.eye(len(norms))
    minimum = minimise_program(matrix, linear, margin, size + margin * float(norms.sum()))
    if minimum.residual > RESIDUAL:  # with rho > 0 the constraints may contradict each other
        return ProgramMinimum(zeros, minimum.residual, NOT_SOLVED)
    return minimum


def minimise_program(
    matrix: Array, linear: Array, lower: float = 0.0, size: float = 1.0
) -> ProgramMinimum:
    """The minimiser of 0.5 v'Av + b'v over v >= lower, and how far it is from optimal.

    `size` is the norm of the vector whose products b holds: the residual is relative to it and to
    the norms of the gradients, the roots of A's diagonal. Gradients of norm 0 are ignored.
    """
    norms = np.sqrt(matrix.diagonal())
    nonzero = np.flatnonzero(norms > 0)
    v = np.full(len(linear), lower)
    if not len(nonzero):
        return ProgramMinimum(v)
    scale = norms[nonzero]
    slopes = (linear + lower * matrix.sum(1))[nonzero] / (scale * size)
    scaled = matrix[np.ix_(nonzero, nonzero)] / np.outer(scale, scale)
    u, residual = _minimise_over_cone(scaled, slopes)
    v[nonzero] += u * size / scale
    return ProgramMinimum(v, residual)


def _minimise_over_cone(matrix: Array, linear: Array) -> tuple[Array, float]:
    """The minimiser u of 0.5 u'Au + b'u over u >= 0, and how far it is from optimal.

    With A = SS' and b = Sp, u are the multipliers of the nearest vector x to p with S x >= 0. At
    the optimum min(u, S x) = 0 and u'S x = 0; the latter notices large multipliers that cancel.
    Dependent gradients differ by rounding alone, which the coarser resolutions leave out.
    """
    best, smallest = np.zeros(len(linear)), np.inf
    for resolution in _RESOLUTIONS:
        rows = coordinates(matrix, resolution)  # S, with orthogonal columns
        bounds = -rows @ (rows.T @ linear / (rows**2).sum(0))  # -b without what S cannot reach
        try:
            u, _ = least_distance(rows, bounds, resolution)
        except RuntimeError:  # too many iterations
            continue
        slope = matrix @ u + linear
        residual = max(float(np.abs(np.minimum(u, slope)).max()), abs(float(u @ slope)))
        if residual < smallest:
            best, smallest = u, residual
        if smallest <= RESIDUAL:
            break
    return best, smallest


def exemplar_gradient(runtime: ClientRuntime, images: Tensor, labels: Tensor) -> Tensor:
    """The live model's gradient on normalised exemplars, by running statistics.  # [P]"""
    set_train_mode(runtime.classifier, update_norms=False)  # eval() in every step would take longer
    loss = F.cross_entropy(runtime.classifier(images), labels.to(runtime.device))
    tensors = runtime.model.tensors
    return flatten_like(torch.autograd.grad(loss, tensors), tensors)


@dataclass
class Corrections:
    """What projection has done in the steps of a client round."""

    corrected: list[bool] = field(default_factory=list)  # of each step
    failures: list[str] = field(default_factory=list)  # why vectors were not corrected

    def apply(self, gradients: Tensor, projection: Projection) -> None:
        self.corrected.append(projection.added is not None)
        self.failures += projection.troubles
        if projection.added is not None:
            gradients.add_(projection.added)

    def log(self, log: Log, name: str) -> None:
        if self.corrected:
            share = sum(self.corrected) / len(self.corrected)
            log_projection(log, name, share, self.failures)


def log_projection(log: Log, name: str, corrected: float, troubles: Iterable[str]) -> None:
    """Log a share of corrected vectors, and why others, or blocks of them, were not corrected."""
    log.numbers[f"{name} corrected"] = corrected
    log.events += [f"{name}: {trouble}, not corrected" for trouble in troubles]
