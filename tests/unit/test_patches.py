"""``import ds_ext`` changes no name of DeepSpeed, torch, accelerate or transformers but patches."""

import sys
from types import ModuleType

import pytest

from tests.common import apart

PACKAGES = ("deepspeed", "torch", "accelerate", "transformers")
# torch's registries, to which importing more of torch and of custom operations adds.
REGISTRIES = {
    *("torch._library.custom_ops.OPDEF_TO_LIB", "torch.jit._builtins._builtin_table"),
    *("torch.library._impls", "torch.library._defs"),
}


def names() -> dict[str, object]:
    """The value of each name in the loaded modules of the packages, and in their classes."""
    found = {}
    for path, module in sorted(sys.modules.items()):
        if path.partition(".")[0] in PACKAGES and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                found[f"{path}.{name}"] = _value(value)
                if isinstance(value, type) and value.__module__ == path:
                    of_class = vars(value).items()
                    found |= {f"{path}.{name}.{own}": _value(each) for own, each in of_class}
    return found


def _value(value: object) -> object:
    """What identifies a value: of a container its elements, which change in place."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else id(key): id(x) for key, x in value.items()}
    return [*map(id, value)] if isinstance(value, (list, tuple, set, frozenset)) else id(value)


def changed() -> list[str]:
    """Names that the import changes or adds. Modules that it imports are none of them."""
    import accelerate  # noqa: F401
    import deepspeed  # noqa: F401

    # Modules that ds_ext imports, and that set names of their packages.
    import torch._dynamo  # noqa: F401
    import transformers  # noqa: F401
    from deepspeed.runtime.sequence_parallel import ulysses_sp  # noqa: F401
    from torch.distributed import fsdp, tensor  # noqa: F401

    before, kept = names(), list(map(vars, [*sys.modules.values()]))  # no id is used again
    import ds_ext  # noqa: F401

    after = names()
    assert kept
    parents = {name.rpartition(".")[0] for name in before}
    return sorted(
        name
        for name, value in after.items()
        if name not in REGISTRIES
        and value != before.get(name)
        and name.rpartition(".")[0] in parents
        and not (name not in before and name in sys.modules)
    )


@pytest.mark.slow
def test_only_patches_change_names():
    """Those of engine/patches.py, each of which says why; contract.json records them."""
    from ds_ext.engine.patches import PATCHES

    code = "from tests.unit import test_patches; print(*test_patches.changed(), sep=chr(10))"
    owners = [(f"{patch.owner.__module__}.{patch.owner.__qualname__}", patch) for patch in PATCHES]
    expected = sorted({f"{owner}.{patch.name}" for owner, patch in owners})
    assert apart.python("-c", code).stdout.splitlines() == expected
