"""8-bit moments have the same bits by torch's operations, native code and kernels."""

import numpy as np
import pytest
import torch

import ds_ext
from tests.common import needs, paths

pytestmark = needs.triton
SIZES = (4 * 4096, 4999)  # tiles of vectors, and others with half a group
ODD = (0.0, -0.0, 1e-9, -1e-9, 1e-20, 1e-40, -1e-45, 1e5, 3e7)
HUGE = (1.8e19, -1.9e19, 1e30, -3.4e38)  # squares of three are infinite
ADAM = [{}, {"eps": 1e-30}, {"betas": (0.4, 0.3)}, {"betas": (0.0, 0.9)}]
CASES = [("FlashAdamW", hypers) for hypers in ADAM]
CASES += [("Lion", {"nbits": 8}), ("Lion", {"nbits": 8, "betas": (0.3, 0.2)})]


def gradients(is_huge):
    """Numbers of all sizes."""
    draw = torch.Generator().manual_seed(0)
    for n in SIZES:
        g = torch.randn(n, generator=draw)
        spread = torch.randint(-40, 10, (n // 32 + 1,), generator=draw).repeat_interleave(32)[:n]
        g *= spread.float().exp2()
        for i, x in enumerate((*ODD, *HUGE) if is_huge else ODD):
            g[i::101] = x
        yield g


def stepped(name, hypers, path, monkeypatch):
    """Weights and states after one step from all codes and many scales."""
    paths.use(monkeypatch, path)
    draw = torch.Generator().manual_seed(1)
    before = [torch.randn(n, generator=draw) for n in SIZES]
    ps = [torch.nn.Parameter(x.clone()) for x in before]
    optimizer = getattr(ds_ext, name)(ps, lr=1e-2, weight_decay=0.1, **hypers)
    for p in ps:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    states = [
        optimizer.state[p][key] for p in ps for key in ("m", "v") if key in optimizer.state[p]
    ]
    for moment in states:
        code, scale = moment["code"], moment["scale"]
        least = -127 if code.dtype == torch.int8 else 0
        code.copy_(torch.randint(least, least + 255, code.shape, generator=draw))
        scale.copy_(torch.randint(-(2**15), 2**15, scale.shape, generator=draw))
        code[:255], scale[0], scale[-1] = torch.arange(least, least + 255), 0, -1
    huge = hypers.get("betas", (0.9, 0.999))[1] > 0.5  # else v is infinite minus infinite
    for p, g in zip(ps, gradients(huge), strict=True):
        p.grad = g
    optimizer.step()
    assert not any(p.equal(x) for p, x in zip(ps, before, strict=True))
    found = [x for moment in states for x in (moment["code"], moment["scale"])]
    return [*(p.detach().view(torch.int32) for p in ps), *found]


@pytest.mark.parametrize("name, hypers", CASES)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_any_number_has_the_bits_of_the_ops(name, hypers, monkeypatch):
    expected = stepped(name, hypers, "ops", monkeypatch)
    for path in ("native", "kernels"):
        for found, want in zip(stepped(name, hypers, path, monkeypatch), expected, strict=True):
            assert found.equal(want), (path, (found != want).nonzero().view(-1)[:9])


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="it replaces the approximations of the interpreter, which a GPU does not use",
)
@pytest.mark.parametrize("toward", [-np.inf, np.inf])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_bits_do_not_depend_on_the_last_bit_of_approximations(toward, monkeypatch):
    """A GPU's reciprocals and roots are inexact before they are corrected."""
    from triton.runtime.interpreter import InterpreterBuilder

    expected, made = stepped("FlashAdamW", {}, "ops", monkeypatch), []
    for name in ("create_fdiv", "create_rsqrt"):
        monkeypatch.setattr(InterpreterBuilder, name, inexact(name, toward, made))
    found = stepped("FlashAdamW", {}, "kernels", monkeypatch)
    assert {*made} == {"create_fdiv", "create_rsqrt"} and all(map(torch.equal, found, expected))


def inexact(name, toward, made):
    """An operation of Triton's interpreter with an error of one unit in the last place."""
    from triton.runtime.interpreter import InterpreterBuilder

    exact = getattr(InterpreterBuilder, name)

    def operation(*args):
        made.append(name)
        handle = exact(*args)
        handle.data = np.nextafter(handle.data, np.float32(toward))
        return handle

    return operation
