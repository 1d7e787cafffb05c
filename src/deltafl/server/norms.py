"""Norms of updates: of each, and of its distance from their mean."""

import numpy as np

from ..types import FloatArray, Params, Reports

#: Numbers converted to float64 at a time.
_BLOCK = 2**16


def squared_norms(update_kd: Params | FloatArray, weight_k: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
    """norm(u_i)^2 and norm(u_i - mean)^2 of updates or their sketches; the mean is plain, or weighted."""
    squared_norm_k, squared_deviation_k = np.zeros((2, len(update_kd)))
    if len(update_kd) == 0:
        return squared_norm_k, squared_deviation_k
    mean_d = np.average(update_kd, axis=0, weights=weight_k)
    rows = max(1, _BLOCK // max(1, update_kd.shape[1]))
    for first in range(0, len(update_kd), rows):
        block = slice(first, first + rows)
        wide_bd = update_kd[block].astype(np.float64)
        # The same bits as row @ row, whatever the block.
        squared_norm_k[block] = (wide_bd[:, None, :] @ wide_bd[:, :, None])[:, 0, 0]
        np.subtract(wide_bd, mean_d, out=wide_bd)
        squared_deviation_k[block] = np.sum(np.square(wide_bd, out=wide_bd), axis=1)
    return squared_norm_k, squared_deviation_k


def measure(update_nd: Params | FloatArray, reports: Reports, weight_n: FloatArray | None = None) -> Reports:
    """Fill ``squared_norms`` of the clients that responded into reports; the other rows are ignored."""
    here = reports.responded_n
    norm_n, deviation_n = np.zeros((2, len(here)))
    norm_n[here], deviation_n[here] = squared_norms(update_nd[here], None if weight_n is None else weight_n[here])
    return reports._replace(squared_norm_n=norm_n, squared_deviation_n=deviation_n)
