"""A line through measurements."""

import pytest

from specgw.line_fit import LineFit


def test_points_of_a_line_give_it_back() -> None:
    fit = LineFit(decay=0.9)
    for x in (1.0, 4.0, 2.0, 8.0):
        fit.observe(x, 3.0 + 0.5 * x)

    (mean_x, mean_y), slope = fit.mean, fit.slope

    assert slope == pytest.approx(0.5)
    assert mean_y == pytest.approx(3.0 + 0.5 * mean_x)


def test_recent_points_count_for_more() -> None:
    fit = LineFit(decay=0.5)
    for y in (8.0, 2.0):
        fit.observe(1.0, y)

    assert fit.mean == pytest.approx((1.0, (0.5 * 8.0 + 2.0) / 1.5))


def test_without_different_points_there_is_no_slope() -> None:
    fit = LineFit(decay=0.9)

    assert (fit.mean, fit.slope) == ((0.0, 0.0), None)
    for _ in range(3):
        fit.observe(4.0, 1.0)
    assert fit.slope is None
