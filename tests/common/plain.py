"""Plain steps of an optimizer in one process: by given gradients, or by the mean of losses."""

import torch
from torch import nn

import ds_ext


def steps(optimizer, params, gradients):
    """Steps ``params`` by the gradients of each step; None stands for no gradient."""
    for grads in gradients:
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else g.to(p.dtype, copy=True)
        optimizer.step()


def stepped(make, before, gradients, state=None):
    """Steps copies of the weights ``before`` by each step's gradients -> new weights, optimizer.

    ``make`` returns the optimizer of a list of parameters; it loads ``state`` first, if any.
    """
    params = [nn.Parameter(p.clone()) for p in before]
    optimizer = make(params)
    if state is not None:
        optimizer.load_state_dict(state)
    steps(optimizer, params, gradients)
    return [p.detach() for p in params], optimizer


def in_parts(make, parts, before, gradients):
    """Steps parts of weights as parameters of their own -> the new parts of each weight.

    ``parts`` cuts a weight, or its gradient.
    """
    params = [[nn.Parameter(x.clone()) for x in parts(p)] for p in before]
    flat = [x for some in params for x in some]
    steps(make(flat), flat, [[x for g in grads for x in parts(g)] for grads in gradients])
    return [[x.detach() for x in some] for some in params]


def mean_step(optimizer, losses, max_norm=0.0):
    """Steps by the mean of losses, clipped to ``max_norm`` if not 0 -> the gradients' norm."""
    optimizer.zero_grad()
    (sum(losses) / len(losses)).backward()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm or torch.inf)
    optimizer.step()
    return float(norm)


def weights(model):
    """Copies of the weights, by name."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def fuse(model, lr=0.1, kind=ds_ext.LOMO, **how):
    """What steps a model within backward, and its optimizer."""
    optimizer = kind(model.parameters(), lr=lr)
    return ds_ext.fuse_into_backward(model, optimizer, **how), optimizer
