"""CPU time of each test, its ranks and subprocesses included: it does not depend on the load.

`pytest --cpu 30` shows the 30 tests that take the most. `python -m tests.tools.cpu` adds up by file
what all such runs have shown: seconds of the tests that are not slow, and of those that are.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import worlds

KNOWN = Path(__file__).parents[2] / "build" / "cpu.json"


def spent() -> float:
    """CPU seconds of this process, of its children that have ended, and of its ranks."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + worlds.spent()


class Meter:
    """The plugin: notes what each test took, in all of xdist's processes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.taken: dict[str, tuple[float, bool]] = {}  # seconds, and whether it is marked slow

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.began = spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[Any]:
        report = yield
        if call.when == "teardown":
            is_slow = item.get_closest_marker("slow") is not None
            report.user_properties.append(("cpu", (spent() - self.began, is_slow)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get("cpu")
        if found is not None and not hasattr(self.config, "workerinput"):
            self.taken[report.nodeid] = tuple(found)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        number = self.config.getoption("--cpu")
        if not number or hasattr(self.config, "workerinput"):
            return
        known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
        KNOWN.parent.mkdir(exist_ok=True)
        KNOWN.write_text(json.dumps(known | self.taken, indent=0))
        total = sum(seconds for seconds, _ in self.taken.values())
        terminalreporter.section(f"{total:.0f} s of CPU time")
        for name, (seconds, _) in sorted(self.taken.items(), key=lambda t: -t[1][0])[:number]:
            terminalreporter.line(f"{seconds:8.2f}  {name}")


def main() -> None:
    files: dict[str, list[float]] = {}
    for name, (seconds, is_slow) in json.loads(KNOWN.read_text()).items():
        files.setdefault(name.split("::")[0], [0.0, 0.0])[is_slow] += seconds
    for name, (quick, slow) in sorted(files.items(), key=lambda f: -f[1][0]):
        print(f"{quick:8.1f} {slow:8.1f}  {name}")
    print(*(f"{sum(kind):8.1f}" for kind in zip(*files.values(), strict=True)))


if __name__ == "__main__":
    main()
