"""A model and its optimizer, what a user does with them, and the reference: torch, one process."""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import came_pytorch
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, checkpoint, create_selective_checkpoint_contexts

from tests.scenarios import odd_rule

WIDTH, HIDDEN, OUT = 6, 8, 5
ABSOLUTE = {"relative_step": False}
# For each optimizer of ds_ext: its hyper-parameters, and which class with what more is the same.
KINDS: dict[str, tuple[dict[str, Any], type, dict[str, Any]]] = {
    "AdamW": ({"lr": 0.01, "eps": 1e-5}, torch.optim.AdamW, {}),
    "LOMO": ({"lr": 0.01}, torch.optim.SGD, {}),
    "AdaLomo": ({"lr": 0.02}, transformers.Adafactor, ABSOLUTE),
    "Adafactor": ({"lr": 0.02} | ABSOLUTE, transformers.Adafactor, {}),
    odd_rule.NAME: ({"lr": 0.02}, odd_rule.Reference, {}),
    "CAME": ({"lr": 0.01, "eps": (1e-30, 1e-3)}, came_pytorch.CAME, {}),
}
Group = tuple[list[str], dict[str, Any]]  # names of its parameters, lr and weight decay


class Failure(Exception):
    """What a user's code raises: no error of ds_ext."""


class Net(nn.Module):
    """No gradient is zero in theory, so that none is all rounding."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, WIDTH)
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.stack = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN) / 3)
        self.last = nn.Linear(HIDDEN, OUT, bias=False)
        self.gain = nn.Parameter(torch.ones(OUT))

    def forward(self, tokens: Tensor, x: Tensor, how: str = "") -> Tensor:
        if how == "failed forward":
            raise Failure
        h = torch.tanh(self.first(self.embed(tokens) + x))
        if how == "failed backward":
            if not h.requires_grad:  # its layers are frozen: nothing comes here
                raise Failure
            h.register_hook(_fail)
        middle: Any = self.middle
        if how == "selective":
            middle = functools.partial(
                checkpoint, middle, use_reentrant=False, context_fn=_selective
            )
        h = middle(h)
        zero = (self.gain - self.gain.detach()).sum()  # whose root has no finite gradient
        bad = {"poisoned": Tensor.sqrt, "poisoned elsewhere": Tensor.square}.get(how)
        return self.last(h) * self.gain + (bad(zero) if bad else 0.0)

    def middle(self, h: Tensor) -> Tensor:
        return torch.tanh(self.norm(h + torch.tanh(h @ self.stack[0]) @ self.stack[1]))


# DeepSpeed gathers some weights in the recomputation alone, after a pass without backward.
SAC_IGNORED_OPS.add(torch.ops.aten.empty.memory_format)


def _selective() -> Any:
    """Keeps products, which may be read once."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def _fail(grad: Tensor) -> None:
    raise Failure


class Side:
    """What a user has, and does; ``setup`` says how it is trained.

    It is plain torch, as anyone writes it; ways and the reference override what differs.
    """

    def __init__(self, setup: dict[str, Any], ranks: Collection[int]) -> None:
        self.setup, self.ranks = setup, ranks  # whose batches it takes
        self.rows = setup["rows"]
        self.micro = 0  # micro-batches of this step so far
        self.saved: Any = None
        self.heads = {rank: nn.Parameter(torch.ones(OUT)) for rank in ranks}  # trained beside
        self.inputs: dict[int, list[Tensor]] = {rank: [] for rank in ranks}
        self.left: dict[str, Tensor] = {}  # gradients that a step has left to others
        self.start(3, setup["groups"])

    def start(self, seed: int, groups: list[Group]) -> None:
        torch.manual_seed(seed)
        self.model = Net(self.rows).to(getattr(torch, self.setup["dtype"]))
        self.spread()
        self.optimizer = self.make(self.setup["kind"], self.groups_of(groups))
        self.attach()

    def make(self, kind: str, groups: list[dict[str, Any]]) -> Any:
        raise NotImplementedError

    def spread(self) -> None: ...

    def attach(self) -> None: ...

    def detach(self) -> None: ...

    def forward(self, *args: Any) -> Tensor:
        return self.model(*args)

    def backward(self, loss: Tensor, **how: Any) -> None:
        (loss / self.setup["accumulation"]).backward(**how)

    def begin(self, seed: int) -> None:
        """The first of two backward passes of one forward pass."""
        self.graph = self.loss(seed)
        self.backward(self.graph, retain_graph=True)

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.micro = 0

    def give_up(self) -> None:
        self.zero_grad()

    def drop(self, names: Collection[str]) -> None:
        for name in names:
            torch.optim.SGD([self.param(name)], lr=0.0).zero_grad()

    def step(self) -> None:
        """Ends a micro-batch, and a step with its last one."""
        self.micro += 1
        if self.micro == self.setup["accumulation"]:
            self.clip()
            self.optimizer.step()
            named, own = self.model.named_parameters(), {*sum(self.lists(), [])}
            left = {n: p.grad for n, p in named if p not in own and p.grad is not None}
            self.left = {n: getattr(g, "full_tensor", g.clone)() for n, g in left.items()}
            self.zero_grad()

    def lists(self) -> list[list[Any]]:
        return [group["params"] for group in self.optimizer.param_groups]

    def clip(self) -> None:
        params = self.with_gradients()
        if params and self.setup["clip"] == "exact":
            nn.utils.clip_grad_norm_(params, self.setup["max"])
        elif params and self.setup["clip"] == "value":
            nn.utils.clip_grad_value_(params, self.setup["max"])

    def clip_both(self) -> None:
        params = [p for params in self.lists() for p in params if p.requires_grad]
        nn.utils.clip_grad_norm_([*params, *self.heads.values()], self.setup["max"])

    def score(self) -> None:
        """Calls another model in inference mode; the reference has none."""

    def with_gradients(self) -> list[Tensor]:
        return [p for params in self.lists() for p in params if p.grad is not None]

    def schedule(self, gamma: float) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma)

    def whole(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def editable(self, p: Tensor) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def save(self) -> None:
        self.saved = copy.deepcopy((self.model.state_dict(), self.states()))

    def states(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load(self) -> None:
        model, optimizer = copy.deepcopy(self.saved)
        self.optimizer.load_state_dict(optimizer)
        self.model.load_state_dict(model)

    def groups_of(self, groups: list[Group]) -> list[dict[str, Any]]:
        return [{"params": [*map(self.param, names)], **hypers} for names, hypers in groups]

    def structure(self) -> list[Group]:
        names = {p: n for n, p in self.model.named_parameters()}
        return [
            ([names[p] for p in g["params"]], {k: g[k] for k in ("lr", "weight_decay")})
            for g in self.optimizer.param_groups
        ]

    def again(self) -> None:
        """A job that starts again: another model and optimizer, with the groups of the old one."""
        groups = self.structure()
        self.detach()
        self.start(4, groups)

    def param(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def loss(
        self, seed: int, forwards: int = 1, head: bool = False, inputs: bool = False,
        penalty: bool = False, how: str = "", scores: bool = False
    ) -> Tensor:  # fmt: skip
        """The mean over this side's ranks of the loss of a batch."""
        losses, dtype = [], next(self.model.parameters()).dtype
        for rank in self.ranks:
            for i in range(forwards):
                generator = torch.Generator().manual_seed(100 * seed + 10 * i + rank)
                tokens = torch.randint(0, self.rows, (4,), generator=generator)
                x = (
                    torch.randn(4, WIDTH, generator=generator)
                    .to(dtype)
                    .requires_grad_(inputs or penalty)
                )
                self.inputs[rank] += [x] * inputs
                is_other = how == "poisoned" and rank > 0
                out = self.forward(tokens, x, "poisoned elsewhere" if is_other else how)
                out = out * self.heads[rank].to(dtype) if head else out
                losses.append((out - 1).square().sum())
                if penalty:
                    (by_input,) = torch.autograd.grad(losses[-1], x, create_graph=True)
                    losses[-1] = losses[-1] + 0.1 * by_input.square().sum()
        if scores:
            self.score()
        return sum(losses[1:], losses[0]) / len(self.ranks)

    def step_heads(self) -> None:
        for head in self.heads.values():
            torch.optim.SGD([head], lr=0.01 * len(self.ranks)).step()
            head.grad = None

    def beside(self, rank: int) -> dict[str, Tensor]:
        """What a rank has of gradients, and of what was trained by them, that are not stepped."""
        own = {"the head": self.heads[rank].detach().clone()}
        # An engine drops them, and a replica has those of its own batch.
        if self.setup["way"] not in ("engine", "replicas"):
            own |= {f"the gradient of {n}, which is in no group,": g for n, g in self.left.items()}
        for i, x in enumerate(self.inputs[rank]):
            own[f"the gradient of input {i}"] = len(self.ranks) * x.grad
        return own

    def cast(self, dtype: torch.dtype) -> None:
        self.model.to(dtype)

    def resize(self, rows: int) -> None:
        old = self.param("embed.weight")
        more = torch.arange(rows * WIDTH, dtype=old.dtype).view(rows, WIDTH).cos()
        more[: len(old)] = old.detach()[:rows]
        old.data, self.rows = more, rows


class Reference(Side):
    """All ranks' batches in one process; of what ds_ext says of its own ways it follows this:

    a gradient that is not finite skips its parameter, or the step if that is measured or kept; of a
    batch that is discarded, what was stepped before stays so.
    """

    moved: Callable[[], list[str]]  # parameters that the other side has stepped already
    previous: float | None = None  # norm of the last step whose gradients were finite
    dropped: Collection[str] = ()  # gradients that backward has measured and not applied

    def make(self, kind: str, groups: list[dict[str, Any]]) -> Any:
        hypers, optimizer, more = KINDS[kind]
        return optimizer(groups, **hypers, **more)

    def attach(self) -> None:
        self.previous = None

    def clip(self) -> None:
        params, clip = self.with_gradients(), self.setup["clip"]
        bad = [p for p in params if not p.grad.isfinite().all()]
        norm = float(torch.stack([p.grad.norm() for p in params]).norm()) if params else math.nan
        before = norm if self.setup["policy"] != "fused" else self.previous
        is_whole = self.setup["policy"] == "sharded" or clip == "exact"
        is_whole |= clip == "previous" and before is None
        for p in params if bad and is_whole else bad:
            p.grad = None
        for p in self.with_gradients() if clip == "previous" else []:
            p.grad *= min(1.0, self.setup["max"] / ((norm if before is None else before) + 1e-6))
        super().clip()
        super().drop(self.dropped)
        self.dropped = ()
        if math.isfinite(norm):
            self.previous = norm

    def save(self) -> None:
        super().save()
        self.saved_previous = self.previous

    def load(self) -> None:
        super().load()
        if self.setup["way"] == "engine":
            self.previous = self.saved_previous

    def states(self) -> dict[str, Any]:
        there, kept = {*sum(self.lists(), [])}, self.optimizer.state
        self.optimizer.state = {p: state for p, state in kept.items() if p in there}
        saved = self.optimizer.state_dict()
        self.optimizer.state = kept
        return saved

    def discard(self, seed: int, how: str) -> None:
        if how.endswith("backward"):
            self.backward(self.loss(seed))
        self.give_up()

    def give_up(self) -> None:
        moved = self.moved()
        previous = self.previous
        self.clip()
        self.previous = previous
        for name, p in self.model.named_parameters():
            p.grad = p.grad if name in moved else None
        self.optimizer.step()
        self.zero_grad()

    def drop(self, names: Collection[str]) -> None:
        names = [name for name in names if name not in self.moved()]
        if self.setup["policy"] == "fused":
            self.dropped = names
        else:
            super().drop(names)

    def cast(self, dtype: torch.dtype) -> None:
        super().cast(dtype)
        for state in self.optimizer.state.values():
            state.update(walk(state, lambda t: t.to(dtype) if t.is_floating_point() else t))

    def resize(self, rows: int) -> None:
        if rows != self.rows:
            self.optimizer.state.pop(self.param("embed.weight"), None)
        super().resize(rows)


def walk(states: Any, found: Callable[[Tensor], Any]) -> Any:
    """A nested state with ``found`` of each tensor that is no number."""
    if isinstance(states, dict):
        return {key: walk(value, found) for key, value in states.items()}
    return found(states) if isinstance(states, Tensor) and states.dim() else states
