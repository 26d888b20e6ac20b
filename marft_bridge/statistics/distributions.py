"""The distribution functions that the statistics are computed with, under scipy's names.

scipy (extra `train`) is loaded when the first of its functions is called, so that whoever only looks at a stored run
needs none of its hundred megabytes. The learning curve's intervals do not need it: `stdtrit` is computed here.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

_SERIES_FROM = 1_000  # degrees of freedom from which the series is exact to the last digits


def ndtr(x: Any) -> Any:
    """P(Z <= x) of the standard normal."""
    from scipy import special

    return special.ndtr(x)


def ndtri(p: Any) -> Any:
    """The p quantile of the standard normal."""
    from scipy import special

    return special.ndtri(p)


def bdtr(k: Any, n: Any, p: Any) -> Any:
    """P(X <= k) of a binomial with n trials."""
    from scipy import special

    return special.bdtr(k, n, p)


def bdtrc(k: Any, n: Any, p: Any) -> Any:
    """P(X > k) of a binomial with n trials."""
    from scipy import special

    return special.bdtrc(k, n, p)


def gammaln(x: Any) -> Any:
    """log |gamma(x)|."""
    from scipy import special

    return special.gammaln(x)


@lru_cache(maxsize=4096)
def stdtrit(df: int, p: float) -> float:
    """The p quantile of Student's t with df degrees of freedom, for 0 < p < 1.

    Abramowitz and Stegun (1964): the finite sums 26.7.3 and 26.7.4, solved by Newton's method, and from 1000 degrees of
    freedom on the series 26.7.5.
    """
    if p < 0.5:
        return -stdtrit(df, 1 - p)
    if df >= _SERIES_FROM:
        return _series_quantile(df, NormalDist().inv_cdf(p))
    half_log_norm = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    t = 0.0  # the distribution function is concave from there on, so that no step passes the quantile
    while True:
        density = math.exp(half_log_norm - (df + 1) / 2 * math.log1p(t * t / df))
        step = (p - 0.5 - _central_half(df, t)) / density
        t += step
        if step <= 1e-13 * t:
            return t


def _central_half(df: int, t: float) -> float:
    """P(0 <= T <= t)."""
    angle = math.atan(t / math.sqrt(df))
    is_odd = df % 2
    count = (df - is_odd) // 2  # terms of the sum
    powers = np.arange(count - 1) * 2.0 + 1 + is_odd
    terms = np.cumprod(np.concatenate([[1.0], math.cos(angle) ** 2 * powers / (powers + 1)]))[:count]
    total = float(terms.sum()) * math.sin(angle)
    return (angle + total * math.cos(angle)) / math.pi if is_odd else total / 2


def _series_quantile(df: int, z: float) -> float:
    w = z * z
    return z * (
        1
        + (w + 1) / (4 * df)
        + ((5 * w + 16) * w + 3) / (96 * df**2)
        + (((3 * w + 19) * w + 17) * w - 15) / (384 * df**3)
        + ((((79 * w + 776) * w + 1482) * w - 1920) * w - 945) / (92160 * df**4)
    )
