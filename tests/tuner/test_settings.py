"""Settings from arguments and the environment."""

from __future__ import annotations

import pytest

from dpro.errors import DproError
from dpro.settings import Settings, active, disabled


def test_defaults_apply_and_the_environment_may_be_empty() -> None:
    assert Settings.from_env({}) == Settings()
    assert Settings().mode == "apply"


@pytest.mark.parametrize("name", ["DPRO_DEBUG", "DPRO_BUILD_JOBS", "DPRO_CACHE"])  # of other tools of the project
def test_variables_that_are_no_settings_stop_no_job(name: str) -> None:
    assert Settings.from_env({name: "1"}) == Settings()


@pytest.mark.parametrize("word", ["1", "on", "true", "yes", "YES", "apply"])
def test_on_words_mean_the_default_mode(word: str) -> None:
    assert Settings.from_env({"DPRO": word}).mode == "apply"
    assert active({"DPRO": word})
    assert not disabled({"DPRO": word})


@pytest.mark.parametrize("word", ["0", "off", "false", "no", "OFF", ""])
def test_off_words_disable(word: str) -> None:
    assert not active({"DPRO": word})
    assert disabled({"DPRO": word})
    assert Settings.from_env({"DPRO": word}).mode == "apply"  # the word chooses no mode


def test_unset_is_neither_active_nor_disabled() -> None:
    assert not active({})
    assert not disabled({})


def test_fields_are_read_with_their_type() -> None:
    env = {
        "DPRO": "observe",
        "DPRO_WARMUP_STEPS": "7",
        "DPRO_MIN_GAIN": "0.02",
        "DPRO_RUNS_DIR": "out",
        "DPRO_PLAN": "p",
    }
    found = Settings.from_env(env)
    assert (found.mode, found.warmup_steps, found.min_gain, found.runs_dir, found.plan) == (
        "observe",
        7,
        0.02,
        "out",
        "p",
    )


def test_what_is_lossy_is_off_unless_allowed() -> None:
    assert [Settings.from_env({}).lossy, Settings.from_env({"DPRO_LOSSY": "1"}).lossy] == [False, True]


def test_arguments_win_and_none_means_not_given() -> None:
    env = {"DPRO": "suggest", "DPRO_TRIALS": "2"}
    assert Settings.from_env(env, mode="observe", trials=1) == Settings(mode="observe", trials=1)
    assert Settings.from_env(env, mode=None, trials=None) == Settings(mode="suggest", trials=2)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"DPRO": "fast"}, "mode 'fast' is not one of observe, suggest, apply"),
        ({"DPRO_WARMUP_STEPS": "many"}, "DPRO_WARMUP_STEPS='many' is not a number"),
        ({"DPRO_WARMUP_STEPS": "2"}, "warmup_steps is 2, must be at least 3"),
        ({"DPRO_SETTLE_STEPS": "1"}, "settle_steps is 1, must be at least 2"),
        ({"DPRO_TRIALS": "0"}, "trials is 0, must be at least 1"),
        ({"DPRO_TIMEOUT_S": "-1"}, "timeout_s is -1.0, must be a finite number of at least 0"),
        ({"DPRO_SEARCH_S": "inf"}, "search_s is inf, must be a finite number of at least 0"),
        ({"DPRO_MIN_GAIN": "nan"}, "min_gain is nan, must be a finite number of at least 0"),
    ],
)
def test_bad_values_are_named(env: dict[str, str], says: str) -> None:
    with pytest.raises(DproError, match=f"^{says.replace('.', '[.]')}$"):
        Settings.from_env(env)
