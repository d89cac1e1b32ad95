"""The comparison of other projects' tests without and with ds_ext's optimizers."""

import os
import subprocess
import sys

import pytest

from tests.tools.peers import __main__ as peers

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="same"/><testcase classname="a" name="broken"><failure message="one
two"/></testcase><testcase classname="a" name="late"><error message="in a fixture"/></testcase>
<testcase classname="a" name="left"><skipped message="no GPU"/></testcase></testsuite></testsuites>
"""


def test_a_report_gives_the_outcome_and_message_of_each_test(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert peers.outcomes(tmp_path / "report.xml") == {
        "a::same": "passed",
        "a::broken": "failed one two",
        "a::late": "failed in a fixture",
        "a::left": "skipped",
    }


@pytest.mark.parametrize(
    "without, ours, found",
    [
        ({"x": "passed"}, {"x": "passed"}, []),
        ({"x": "failed one"}, {"x": "failed two"}, []),
        ({"x": "passed"}, {"x": "failed two"}, ["x: failed two"]),
        ({"x": "failed one"}, {"x": "passed"}, ["x: passed"]),
        ({"x": "passed"}, {"x": "skipped"}, ["x: skipped"]),
        ({"x": "passed"}, {}, ["x: missing"]),
    ],
)
def test_a_test_differs_if_its_outcome_does(without, ours, found):
    assert peers.differing(without, ours) == found


def test_swapped_optimizers_take_arguments_of_torch_and_are_of_ds_ext():
    code = """
import inspect, pickle, torch, ds_ext
p = torch.nn.Parameter(torch.ones(2))
made = [torch.optim.SGD([p], 0.1), torch.optim.Adam([p], 0.1, (0.8, 0.9), foreach=True)]
made.append(torch.optim.AdamW([p], amsgrad=False))
assert [type(pickle.loads(pickle.dumps(x))).rule.__name__ for x in made] == ["LOMO"] + ["AdamW"] * 2
assert made[1].defaults["betas"] == (0.8, 0.9) and made[1].defaults["weight_decay"] == 0
assert "momentum" in inspect.signature(torch.optim.SGD.__init__).parameters
try:
    torch.optim.SGD([p], 0.1, momentum=0.9)
except ValueError as error:
    print(error)
"""
    path = [str(peers.HERE / "swapped"), str(peers.ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    assert "LOMO: unknown key momentum" in done.stdout, done.stderr
