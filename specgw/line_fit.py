"""A straight line through what was measured, in which recent points count for more."""

from dataclasses import dataclass

_MIN_VARIANCE = 0.1  # of x, for a slope to be known


@dataclass(slots=True)
class LineFit:
    """Least squares over points whose weights decay with each new one."""

    decay: float
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, x: float, y: float) -> None:
        """Takes in one point."""
        self.weight = self.decay * self.weight + 1.0
        self.x = self.decay * self.x + x
        self.y = self.decay * self.y + y
        self.xx = self.decay * self.xx + x * x
        self.xy = self.decay * self.xy + x * y

    @property
    def mean(self) -> tuple[float, float]:
        """The weighted mean of x and of y; zeros before any point."""
        weight = max(self.weight, 1.0)  # that of a single point
        return self.x / weight, self.y / weight

    @property
    def slope(self) -> float | None:
        """What y grows with x; None while all x are much the same."""
        if self.weight == 0:
            return None
        mean_x, mean_y = self.mean
        variance = self.xx / self.weight - mean_x**2
        if variance <= _MIN_VARIANCE:
            return None
        return (self.xy / self.weight - mean_x * mean_y) / variance
