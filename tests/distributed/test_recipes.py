"""docs/guides/recipes.md: two ranks train with each of its configs."""

import json
import re

import pytest

from tests import worlds
from tests.distributed import recipes_jobs

PAGE = worlds.ROOT / "docs/guides/recipes.md"
SECTIONS = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text()))


@pytest.mark.parametrize("section", SECTIONS)
def test_a_config_trains(section):
    (config,) = re.findall(r"(?ms)^```json\n(.*?)^```$", SECTIONS[section])
    calls = "".join(re.findall(r"(?ms)^```python\n(.*?)^```$", SECTIONS[section]))
    for losses in worlds.run(2, recipes_jobs.train, json.loads(config), calls):
        assert all(a != b for a, b in zip(losses, losses[1:], strict=False)), losses
        assert losses[2] < losses[0]
