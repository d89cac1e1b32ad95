"""Names of DeepSpeed, torch, accelerate and transformers that ``import ds_ext`` changes.

``python -m tests.unit.test_patches`` prints them, and the methods that our own classes override.
"""

import sys
from types import ModuleType

import pytest

from tests.unit.test_walls import in_a_new_process

PACKAGES = ("deepspeed", "torch", "accelerate", "transformers")
# By name: the jobs of the patch.
PATCHES = {
    "config.DeepSpeedConfig.__init__": ("errors of our configs",),
    "engine.DeepSpeedEngine.__init__": ("class", "ignored settings"),
    "engine.DeepSpeedEngine._backward_prologue": ("measuring pass that reaches other engines",),
    "engine.DeepSpeedEngine._do_optimizer_sanity_check": ("refuse a function", "take over"),
    "sequence_parallel.ulysses_sp.SequenceTiledCompute.backward": ("gradient penalty",),
    "sequence_parallel.ulysses_sp.SequenceTiledCompute.forward": ("wait for tiles",),
    "sequence_parallel.ulysses_sp.TiledFusedLogitsLoss.forward": ("gradients of forward",),
    "sequence_parallel.ulysses_sp.TiledMLP.backward": ("gradient penalty",),
    "sequence_parallel.ulysses_sp.TiledMLP.forward": ("wait for tiles",),
    "zero.partition_parameters.GatheredParameters.__exit__": ("0-d parameters",),
    "zero.partition_parameters.Init.__init__": ("0-d parameters",),
}
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


def overridden() -> list[str]:
    """Methods of DeepSpeed that our classes override."""
    from ds_ext.engine import own_engine, patches

    owners = (own_engine.OwnEngine, own_engine.OwnPipelineEngine)
    owners += (patches.OwnInit,)
    of_python = {"__module__", "__doc__", "__firstlineno__", "__static_attributes__"}
    return [f"{own.__name__}.{name}" for own in owners for name in vars(own).keys() - of_python]


@pytest.mark.slow
def test_few_names_change():
    found = in_a_new_process("from tests.unit import test_patches; test_patches.show()")
    lines = found.splitlines()
    patched = [line.removeprefix("patch ") for line in lines if line.startswith("patch ")]
    assert patched == [f"deepspeed.runtime.{name}" for name in sorted(PATCHES)]
    assert sum(map(len, PATCHES.values())) <= 15
    assert len([line for line in lines if line.startswith("override ")]) <= 26


def show() -> None:
    """Prints the table."""
    for name in changed():
        print("patch", name)
    for name in sorted(overridden()):
        print("override", name)


if __name__ == "__main__":
    show()
