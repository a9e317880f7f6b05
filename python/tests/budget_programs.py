"""Programs for tests of remat.budget: each makes a net and returns a step, whose results must equal
plain torch's."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

import remat
from common import leaf

Step = Callable[[], list[Any]]


def state_of(net: nn.Module) -> list[Any]:
    """Returns the parameters, buffers and gradients of a net after a step."""
    gradients = [each.grad for each in net.parameters()]
    return [*net.parameters(), *net.buffers(), *gradients]


# ---- programs: each makes a net and returns a step, whose results must equal plain torch's ----


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1)) / math.sqrt(w // 4)
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = F.dropout(weights.masked_fill(hidden, -math.inf).softmax(-1), 0.1)
        x = x + F.dropout(self.out((weights @ v).transpose(1, 2).reshape(b, t, w)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class Gpt(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(blocks))
        self.head = nn.Linear(width, 50)
        self.call: Callable[..., Any] = lambda block, x: block(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def gpt(call: Optional[Callable[..., Any]] = None) -> Step:
    net, ids = Gpt(), torch.randint(0, 50, (8, 33))
    if call is not None:
        net.call = call

    def step() -> list[Any]:
        loss = net.loss(ids)
        loss.backward()
        return [loss, *state_of(net)]

    return step


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.two(self.relu(self.norm(self.one(x)))))
        y += x
        return self.relu(y)


def resnet() -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Residual(8) for _ in range(4)),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))

    def step() -> list[Any]:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return [loss, *state_of(net)]

    return step


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4 << i, 8 << i, 3, padding=1) for i in range(3))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(16 << i if i else 8, 4 << i, 2, stride=2) for i in range(3)
        )
        self.mix = nn.ModuleList(
            nn.Conv2d(8 << i, 8 << i if i else 4, 3, padding=1) for i in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for conv in self.down:
            kept.append(x)
            x = F.max_pool2d(F.silu(conv(x)), 2)
        for i in (2, 1, 0):
            up = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = F.silu(self.mix[i](torch.cat([up[:, : 4 << i], kept[i]], 1)))
        return x


def unet() -> Step:
    net, x = UNet(), torch.randn(2, 4, 32, 32)

    def step() -> list[Any]:
        out = net(x)
        out.square().mean().backward()
        return [
            out,
            *state_of(net)[: len(list(net.parameters()))],
            *[p.grad for p in net.parameters()],
        ]

    return step


def lstm() -> Step:
    cell, x = nn.Linear(48, 128), torch.randn(24, 16, 16)

    def step() -> list[Any]:
        h = c = torch.zeros(16, 32)
        for each in x:
            i, f, g, o = cell(torch.cat([each, h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        h.sum().backward()
        return [h, c, *state_of(cell)]

    return step


def recursion() -> Step:
    net = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    x = torch.randn(64, 32)

    def visit(x: torch.Tensor, depth: int) -> torch.Tensor:
        x = net[depth % 3](x).tanh()
        if depth == 5 or len(x) < 4:
            return x.sum(0)
        middle = x.mean(1).median().item()
        chosen = x.mean(1) > middle
        left = visit(x[chosen], depth + 1)
        return left * visit(x[~chosen], depth + 1) if left.sum().item() > 0 else left - x.mean(0)

    def step() -> list[Any]:
        out = visit(x, 0)
        out.sum().backward()
        return [out, *state_of(net)]

    return step


def written() -> Step:
    w, x = leaf(64, 64), torch.randn(64, 64)

    def step() -> list[Any]:
        y = x @ w
        y[:, ::2] *= 0.5
        y[3:9].add_(1.0)
        y.relu_()
        z = y.t().contiguous().sigmoid()
        table = torch.zeros(64, 64)
        table[:32] = z[32:].detach()
        with torch.no_grad():
            torch.mul(table, 2.0, out=table)
        z = z * table
        z = z.index_put((torch.tensor([0, 5]),), torch.ones(64)).view(32, 128)
        z.unsqueeze_(0).squeeze_(0)
        out = (z.exp_() * z[0].clone()).masked_fill_(z > 2, 0.0)
        out.sum().backward()
        return [out, table, w.grad]

    return step


def penalty() -> Step:
    net = nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1)
    )
    x = leaf(64, 32)

    def step() -> list[Any]:
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return [loss, slope, *state_of(net)]

    return step


def three_losses() -> Step:
    net, x = Gpt(2), torch.randint(0, 50, (4, 32))

    def step() -> list[Any]:
        out = net(x).log_softmax(-1)
        losses = [out[..., 0].mean(), out.exp().square().sum(), out.logsumexp(0).max()]
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i < 2)
        return [*losses, *state_of(net)]

    return step


def autocast(inside: bool) -> Step:
    net, x = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU()))
    ), torch.randn(64, 64)

    def step() -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (net(x) + net(x + 1)).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [loss, *state_of(net)]

    return step


def training(make: Callable[[Any], torch.optim.Optimizer]) -> Step:
    net, ids = Gpt(2), torch.randint(0, 50, (4, 33))
    optimizer = make(net.parameters())

    def step() -> list[Any]:
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = net.loss(ids)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        state = [each for of_one in optimizer.state.values() for each in of_one.values()]
        return [losses, *state, *state_of(net)]

    return step


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, square = ctx.saved_tensors
        return gradient * (2 * square + x * x)


def custom_function() -> Step:
    w = leaf(64, 64)

    def step() -> list[Any]:
        x = w
        for _ in range(6):
            x = Cube.apply(x.sin()).exp()
        x.sum().backward()
        return [x, w.grad]

    return step


def sparse() -> Step:
    net = nn.Sequential(
        nn.Embedding(100, 32, sparse=True), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    ids = torch.randint(0, 100, (512,))

    def step() -> list[Any]:
        out = net(ids)
        out.square().sum().backward()
        state = state_of(net)
        return [out, *(each.to_dense() if each.is_sparse else each for each in state)]

    return step


def upstreams(block: Any, x: torch.Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def compiled() -> Step:
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())
    x = torch.randn(64, 64)
    run = torch.compile(net, backend="eager")

    def step() -> list[Any]:
        out = run(x) * run(x + 1)
        out.sum().backward()
        return [out, *state_of(net)]

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    "gpt": gpt,
    "resnet": resnet,
    "unet": unet,
    "lstm": lstm,
    "recursion": recursion,
    "written": written,
    "penalty": penalty,
    "three losses": three_losses,
    "autocast, backward outside": lambda: autocast(False),
    "autocast, backward inside": lambda: autocast(True),
    "sgd": lambda: training(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adam": lambda: training(lambda p: torch.optim.Adam(p, 0.01, foreach=True)),
    "custom function": custom_function,
    "sparse": sparse,
    "torch.utils.checkpoint inside": lambda: gpt(upstreams),
    "remat.checkpoint inside": lambda: gpt(lambda block, x: remat.checkpoint(block, x)),
    "compiled": compiled,
}


def run(make: Callable[[], Step], budget: Optional[remat.Budget] = None) -> tuple[list[Any], int]:
    """Returns the results of a step with the generator's state, and the most bytes that were alive
    in it."""
    torch.manual_seed(7)
    step = make()
    meter = remat.MemoryMeter()
    before = meter.live_bytes
    if budget is None:
        results = step()
    else:
        with budget:
            results = step()
    return [*results, torch.get_rng_state()], meter.peak_bytes - before
