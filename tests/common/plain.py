"""Steps of an optimizer by given gradients, without a backward pass."""

from torch import nn


def steps(optimizer, params, gradients):
    """Steps ``params`` by the gradients of each step; None stands for no gradient."""
    for grads in gradients:
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else g.to(p.dtype, copy=True)
        optimizer.step()


def stepped(make, before, gradients, state=None):
    """Steps copies of the weights ``before`` -> the new weights, and the optimizer.

    Args:
        make: Returns the optimizer of a list of parameters.
        before: Weights, which are not changed.
        gradients: Lists of gradients, one for each step.
        state: A state dict that the optimizer loads first.
    """
    params = [nn.Parameter(p.clone()) for p in before]
    optimizer = make(params)
    if state is not None:
        optimizer.load_state_dict(state)
    steps(optimizer, params, gradients)
    return [p.detach() for p in params], optimizer
