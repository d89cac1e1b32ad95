"""Groups of DeepSpeed get the time limit of all ranks."""

from datetime import timedelta
from types import SimpleNamespace

from ds_ext.engine import layouts


def test_groups_get_their_time_limit_without_a_warning(monkeypatch):
    """By the function that torch 2.15 has, which warns of the older one."""
    told, limit = [], timedelta(seconds=7)
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=limit))
    everyone = SimpleNamespace(_get_backend=lambda device: backend)
    torch_215 = SimpleNamespace(
        group=SimpleNamespace(WORLD=everyone),
        set_timeout=lambda *given: told.append(given),
        distributed_c10d=SimpleNamespace(_set_pg_timeout=None),
    )
    monkeypatch.setattr(layouts, "dist", torch_215)
    layouts.share_time_limit(SimpleNamespace(groups={"a group"}, device="cpu"))
    assert told == [(limit, "a group")]
