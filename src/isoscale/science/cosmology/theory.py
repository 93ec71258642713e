"""Background expansion, linear growth and linear power spectrum of a flat universe of matter and a constant Λ.

Lengths are comoving and in Mpc/h, times in 1/H0, and growth is 1 today. Radiation is left out: from redshift 49 on,
it changes the growth by a per cent or two.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

NUM_POINTS = 4096
"""Of an integral."""


@dataclass(frozen=True)
class Cosmology:
    """Cosmological parameters of a flat ΛCDM universe."""

    omega_m: float = 0.31
    """Matter, dark and baryonic, in critical densities."""
    omega_b: float = 0.0487
    """Baryons."""
    h: float = 0.675
    """Hubble's constant in 100 km/s/Mpc."""
    n_s: float = 0.96
    """Slope of the primordial power spectrum."""
    sigma_8: float = 0.83
    """Standard deviation of the linear density today in spheres of 8 Mpc/h."""
    t_cmb: float = 2.7255
    """Temperature of the microwave background in K."""

    def expansion(self, a: float) -> float:
        """The Hubble rate in units of H0 at a scale factor."""
        return math.sqrt(self.omega_m / a**3 + 1 - self.omega_m)

    def time(self, a: float) -> float:
        """The age of the universe in 1/H0 at a scale factor."""
        omega_l = 1 - self.omega_m
        return 2 / (3 * math.sqrt(omega_l)) * math.asinh(math.sqrt(omega_l / self.omega_m * a**3))

    def growth(self, a: float) -> float:
        """The linear growth factor D, 1 today."""
        return self._growth(a) / self._growth_today

    def growth_rate(self, a: float) -> float:
        """The logarithmic derivative d ln D / d ln a of the growth factor."""
        square = self.expansion(a) ** 2
        return 2.5 * self.omega_m / (a**2 * square * self._growth(a)) - 1.5 * self.omega_m / (a**3 * square)

    def matter_fraction(self, a: float) -> float:
        """Matter in critical densities of the time."""
        return self.omega_m / (a**3 * self.expansion(a) ** 2)

    def _growth(self, a: float) -> float:
        """The growth factor that tends to `a` early: 5/2 Ω_m E ∫ da/(aE)³, smooth as an integral over √a."""
        root = torch.linspace(0, math.sqrt(a), NUM_POINTS, dtype=torch.float64)
        integrand = 2 * root**4 / (self.omega_m + (1 - self.omega_m) * root**6) ** 1.5
        return 2.5 * self.omega_m * self.expansion(a) * float(torch.trapezoid(integrand, root))

    @cached_property
    def _growth_today(self) -> float:
        return self._growth(1.0)

    def power(self, k: Tensor) -> Tensor:
        """The linear power spectrum P(k) today in (Mpc/h)³, of wave numbers in h/Mpc; 0 at k = 0."""
        return self._amplitude * self._shape(k)

    def sigma(self, radius: float) -> float:
        """The standard deviation of the linear density today in spheres of a radius."""
        return math.sqrt(self._amplitude) * self._sigma_of_shape(radius)

    @cached_property
    def _amplitude(self) -> float:
        return (self.sigma_8 / self._sigma_of_shape(8.0)) ** 2

    def _sigma_of_shape(self, radius: float) -> float:
        log_k = torch.linspace(math.log(1e-5), math.log(1e2), NUM_POINTS, dtype=torch.float64)
        k = log_k.exp()
        integrand = k**3 / (2 * math.pi**2) * self._shape(k) * top_hat(k * radius) ** 2
        return math.sqrt(float(torch.trapezoid(integrand, log_k)))

    def _shape(self, k: Tensor) -> Tensor:
        """Power law times the transfer function without baryon wiggles of Eisenstein & Hu (1998), eqs. 26 and 28-31."""
        matter, fraction = self.omega_m * self.h**2, self.omega_b / self.omega_m
        horizon = 44.5 * math.log(9.83 / matter) / math.sqrt(1 + 10 * (self.omega_b * self.h**2) ** 0.75)  # Mpc
        alpha = 1 - 0.328 * math.log(431 * matter) * fraction + 0.38 * math.log(22.3 * matter) * fraction**2
        gamma = self.omega_m * self.h * (alpha + (1 - alpha) / (1 + (0.43 * k * self.h * horizon) ** 4))
        q = k * (self.t_cmb / 2.7) ** 2 / gamma
        logarithm = torch.log(2 * math.e + 1.8 * q)
        transfer = logarithm / (logarithm + (14.2 + 731 / (1 + 62.5 * q)) * q**2)
        return k**self.n_s * transfer**2


def top_hat(x: Tensor) -> Tensor:
    """The Fourier transform of a sphere, of wave number times radius."""
    small = x.abs() < 1e-2
    safe = torch.where(small, 1, x)
    return torch.where(small, 1 - x**2 / 10, 3 * (safe.sin() - safe * safe.cos()) / safe**3)
