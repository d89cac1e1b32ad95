"""The demo's progress: when it can tell how long it will take, and what it measures the loss on."""

import pytest

from tests.tools.snippets import ROOT


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetune
    import progress

    return finetune, progress


def test_the_time_left_is_told_after_two_steps_and_leaves_out_the_first(demo):
    _, progress = demo
    assert progress.remaining([90.0], [80.0], 40, 5) is None
    # 38 steps of 4 s; evaluations at 5, 10, ..., 40 of 6 s each
    assert progress.remaining([90.0, 4.0], [80.0, 6.0], 40, 5) == 38 * 4 + 8 * 6
    # the last step is evaluated though it is no multiple; one evaluation alone counts
    assert progress.remaining([9.0, 1.0, 3.0], [7.0], 6, 5) == 3 * 2 + 2 * 7
    assert progress.remaining([9.0, 1.0], [7.0], 2, 5) == 0


@pytest.mark.parametrize(
    "there, most, rows", [(94, 16, 16), (10, 16, 10), (94, 0, 94), (17, 16, 16)]
)
def test_the_held_out_rows_are_spread_over_all(demo, there, most, rows):
    import datasets

    data = datasets.Dataset.from_dict({"row": list(range(there))})
    got = demo[0].spread(data, most)["row"]
    assert len(got) == rows and got == sorted(got) and got[-1] >= there * 0.7
