"""Saves of two jobs into one folder do not disturb each other; nor does Ctrl-C in a save."""

import pytest

from ds_ext.checkpoint import manifests
from tests import worlds
from tests.common.choose import params
from tests.distributed import concurrent_saves_jobs as jobs

TAGS = {"other tags": "job{job}-{i}", "one tag": "both"}
CASES = [(ranks, kind) for ranks in (1, 2) for kind in TAGS]


@pytest.mark.parametrize("ranks, kind", params(CASES, [(1, "one tag")]))
def test_what_a_save_returned_from_is_complete(tmp_path, ranks, kind):
    folder = tmp_path / "run"
    failed = jobs.side_by_side(str(folder), ranks, TAGS[kind], kills=4)
    assert not failed, failed
    returned = jobs.returned(str(folder), 1) + jobs.returned(str(folder), 2)
    assert len(returned) >= 2 * jobs.SAVES - 4
    found = worlds.run(1, jobs.load_all, str(folder))[0]
    if kind == "one tag":
        assert list(found) == ["both"] and found["both"] in returned
    else:
        assert set(returned) <= set(found.values())
    assert manifests.latest(folder) in found
    assert not list(folder.glob(".*"))


def test_after_ctrl_c_in_a_save_one_goes_on(tmp_path):
    calls, wrong = worlds.run(1, jobs.interrupted, str(tmp_path / "run"))[0]
    assert calls > 20 and not wrong, wrong
