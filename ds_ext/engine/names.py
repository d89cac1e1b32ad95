"""What a config's ``"type"`` means: an optimizer of ours, DeepSpeed's or torch's."""

import difflib

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from ds_ext.engine.log import log
from ds_ext.optimizer import OPTIMIZERS, named
from ds_ext.rules.base import REGISTRY, key_of

PREFIX = "ds_ext."  # any optimizer of ours can be named with it
# Names of DeepSpeed's own, and of those the ones that mean ours without the prefix too.
_DEEPSPEEDS = frozenset(DEEPSPEED_OPTIMIZERS)
_TAKEN_OVER = {
    "adafactor": "torch.optim's, whose state DeepSpeed leaves full-sized and unfactored",
    "lamb": "DeepSpeed's FusedLamb",
}


def tell_deepspeed(name: str) -> None:
    """Lets a DeepSpeed config name an optimizer of ours, in any case.

    Args:
        name: of its rule, in lower case.
    """
    spelling = REGISTRY[name].spelling.lower()
    for known in (name, spelling, PREFIX + name, PREFIX + spelling):
        if known not in DEEPSPEED_OPTIMIZERS:
            DEEPSPEED_OPTIMIZERS.append(known)


def ours(name: str | None) -> str | None:
    """Returns the key in ``OPTIMIZERS`` of what a config names, None if that is not ours.

    Args:
        name: ``optimizer.type``, which DeepSpeed has made lower case if it knows it.
    """
    own = key_of(name or "")
    is_theirs = own == name and own in _DEEPSPEEDS - _TAKEN_OVER.keys()
    return own if own in OPTIMIZERS and not is_theirs else None


def refuse_unknown(name: str) -> None:
    """Raises ValueError for a name that no optimizer has: of ours, DeepSpeed's or torch's.

    Args:
        name: ``optimizer.type``, which DeepSpeed has made lower case if it knows it.
    """
    if name in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, name):
        return
    if name.lower().startswith(PREFIX):
        named(name)
    spelled = [entry.spelling for entry in REGISTRY.values()]
    by_lower = {known.lower(): known for known in [*_DEEPSPEEDS, *spelled]}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    guess = f' Did you mean "{by_lower[near[0]]}"?' if near else ""
    raise ValueError(
        f"optimizer.type is {name!r}, an optimizer neither of ds_ext nor of DeepSpeed nor of "
        f"torch.optim.{guess} Those of ds_ext: {', '.join(spelled)}."
    )


def tell_whose(name: str) -> None:
    """Logs which of two optimizers of one name was taken, if there are two.

    Args:
        name: ``optimizer.type``, known to DeepSpeed.
    """
    own = key_of(name)
    if own not in OPTIMIZERS or own not in _DEEPSPEEDS | _TAKEN_OVER.keys():
        return
    kind = OPTIMIZERS[own].__name__
    if ours(name):
        theirs = _TAKEN_OVER.get(own, f'DeepSpeed\'s, whose type is "{kind}"')
        log(f"{kind} is ds_ext's, not {theirs}")
    else:
        log(f"{kind} is DeepSpeed's; the type of ds_ext's is \"{PREFIX}{kind}\"")
