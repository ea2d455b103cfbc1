import pytest

from banyan.engine.loop import LEAD_S, StepForecast


def test_an_unknown_step_is_planned_for_at_once():
    assert StepForecast().wait(tokens=8, running_s=0.0) == 0.0


def test_planning_waits_until_the_step_in_flight_is_nearly_over():
    forecast = StepForecast()
    forecast.measured(8, 0.1)
    assert abs(forecast.wait(8, running_s=0.03) - (0.07 - LEAD_S)) < 1e-9
    assert forecast.wait(8, running_s=0.2) == 0.0


def test_slow_planning_starts_earlier():
    forecast = StepForecast()
    forecast.measured(8, 0.1)
    before = forecast.wait(8, 0.0)
    forecast.planned(0.01)
    assert forecast.wait(8, 0.0) < before


def test_a_launch_next_to_the_step_starts_earlier_by_what_it_takes():
    forecast = StepForecast()
    forecast.measured(8, 0.1)
    before = forecast.wait(8, 0.0)
    for _ in range(40):
        forecast.launched(0.01)
    assert abs(before - forecast.wait(8, 0.0) - 0.02) < 1e-6


def test_small_and_large_steps_are_distinguished():
    forecast = StepForecast()
    forecast.measured(1, 0.01)
    forecast.measured(512, 1.0)
    assert forecast.wait(1, 0.0) < 0.01 < forecast.wait(600, 0.0)


def test_of_several_steps_that_follow_each_other_one_is_time_kept():
    forecast = StepForecast()
    forecast.measured(1, 0.010)
    alone, eight = forecast.wait(1, 0.0), forecast.wait(1, 0.0, steps=8)
    assert eight == pytest.approx(alone + 6 * 0.010)
