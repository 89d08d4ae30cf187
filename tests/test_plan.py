"""A plan survives its file, refuses what it does not know, and hashes by content."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import PlanError
from dpro.plan import Plan

PLAN = Plan(
    fingerprint={"model": "abc", "world_size": "2"},
    tensor_groups=[["fc.weight", "fc.bias"], ["conv.weight"]],
    bucket_caps=[1.0, 0.5],
    ddp_options={"gradient_as_bucket_view": True},
    predicted_ms=10.25,
    baseline_ms=12.5,
)

names = st.lists(st.text(min_size=1, max_size=5), unique=True, min_size=1, max_size=6)
positive = st.floats(min_value=1e-6, max_value=1e6)
plans = st.builds(
    Plan,
    fingerprint=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    tensor_groups=st.none() | names.map(lambda found: [found[:1], found[1:]] if found[1:] else [found]),
    partitions=st.none() | st.dictionaries(st.text(max_size=5), st.integers(1, 2**40), max_size=3),
    fusion_threshold=st.none() | st.integers(0, 2**40),
    cycle_time=st.none() | st.floats(0.001, 1000),
    bucket_caps=st.none() | st.lists(positive, min_size=1, max_size=4),
    accumulate=st.none() | st.integers(1, 64),
    gradient_dtype=st.none() | st.sampled_from(["bfloat16", "float16"]),
    predicted_ms=st.none() | positive,
)


@settings(deadline=None)
@given(plans)
def test_round_trip(plan: Plan) -> None:
    again = Plan.loads(plan.dumps())
    assert again == plan
    assert again.sha256 == plan.sha256


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN


def test_hash_is_of_the_content_not_of_the_layout() -> None:
    shuffled = dict(reversed(json.loads(PLAN.dumps()).items()))
    assert Plan.loads(json.dumps(shuffled, indent=3)).sha256 == PLAN.sha256
    other = Plan.loads(PLAN.dumps().replace("0.5", "0.25"))
    assert other.sha256 != PLAN.sha256


def test_settings_leave_identity_and_predictions_aside() -> None:
    assert PLAN.settings() == {
        "tensor_groups": [["fc.weight", "fc.bias"], ["conv.weight"]],
        "bucket_caps": [1.0, 0.5],
        "ddp_options": {"gradient_as_bucket_view": True},
    }


@pytest.mark.parametrize("version", ['"1"', "1.0", "true", "null"])
def test_a_version_is_a_whole_number(version: str) -> None:
    with pytest.raises(PlanError, match="must be a whole number, such as 1"):
        Plan.loads(f'{{"version": {version}}}')


def test_unknown_key_is_refused() -> None:
    with pytest.raises(PlanError, match="unknown key 'bucket_cap'"):
        Plan.loads('{"bucket_cap": [25]}')


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 2}',
        '{"version": "1"}',
        '{"bucket_caps": []}',
        '{"bucket_caps": [0]}',
        '{"bucket_caps": [-1.0]}',
        '{"bucket_caps": [true]}',
        '{"bucket_caps": ["25"]}',
        '{"bucket_caps": 25}',
        '{"bucket_caps": [NaN]}',
        '{"bucket_caps": [Infinity]}',
        '{"predicted_ms": NaN}',
        '{"baseline_ms": -1}',
        '{"baseline_ms": 1e999}',
        '{"tensor_groups": []}',
        '{"tensor_groups": [[]]}',
        '{"tensor_groups": [["a"], ["a"]]}',
        '{"tensor_groups": [[1]]}',
        '{"partitions": {"a": 0}}',
        '{"partitions": {"a": 1.5}}',
        '{"fusion_threshold": -1}',
        '{"fusion_threshold": true}',
        '{"cycle_time": 0}',
        '{"cycle_time": 1001}',
        '{"accumulate": 0}',
        '{"gradient_dtype": "float32"}',
        '{"gradient_dtype": ["float16"]}',
        '{"ddp_options": {"static_graph": 1}}',
        '{"fingerprint": {"world_size": 2}}',
        '{"order": "abc"}',
        '{"recompute": [null]}',
        "[]",
        "null",
        "3",
        '""',
        "",
        "[",
        "[" * 100_000,
        PLAN.dumps()[:-10],
    ],
)
def test_bad_text_is_one_line(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.loads(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_nan_cannot_be_built_either() -> None:
    with pytest.raises(PlanError):
        Plan(predicted_ms=float("nan"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes.fromhex("ffd8ffe000104a46494600010100") + bytes(range(256)),  # a JPEG
        gzip.compress(PLAN.dumps().encode()),
        PLAN.dumps().encode()[:40],
        b"\x00" * 64,
    ],
    ids=["empty", "jpeg", "gzip", "cut", "zeros"],
)
def test_bad_file_is_one_line_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlanError, match=str(path)) as caught:
            Plan.load(path)
        assert "\n" not in str(caught.value)
