"""Models as people train them: ten steps with regions are bit-equal to ten without."""

from __future__ import annotations

import functools
import inspect
import unittest
from typing import Any, Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import remat
from common import Case, run_script, whole

Run = Callable[..., Any]


class Block(nn.Module):
    """A transformer's block. (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.embedding, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


class Residual(nn.Module):
    """A ResNet's block, in place where it is. (B, C, H, W) -> (B, C, H, W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(y + x)


class ResNet(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.lstm = nn.LSTM(4, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for part in x.split(3, dim=1):  # truncated nowhere: the gradient goes through all states
            y, state = self.run(self.lstm, part, state)
        return self.head(y[:, -1])


def plain(function: Run, *args: Any) -> Any:
    return function(*args)


def train(
    make: Callable[[Run], nn.Module], run: Run, batch: Callable[[int], torch.Tensor]
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = make(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + [p.detach() for p in model.parameters()]


def seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


MODELS: dict[str, tuple[Callable[[Run], nn.Module], Callable[[int], torch.Tensor]]] = {
    "transformer": (Transformer, lambda step: torch.randint(0, 16, (2, 8), generator=seeded(step))),
    "resnet": (ResNet, lambda step: torch.randn(2, 3, 8, 8, generator=seeded(step))),
    "lstm": (Recurrent, lambda step: torch.randn(2, 9, 4, generator=seeded(step))),
}

OPS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default]


class Models(Case):
    def ways(self) -> dict[str, Run]:
        drop_in = functools.partial(checkpoint, use_reentrant=False)
        selective = functools.partial(create_selective_checkpoint_contexts, OPS)
        if "early_stop" in inspect.signature(checkpoint).parameters:  # since torch 2.8
            whole = functools.partial(drop_in, early_stop=False)
        else:
            whole = drop_in
        return {
            "drop-in": drop_in,
            "drop-in, selective": functools.partial(drop_in, context_fn=selective),
            "drop-in, no early stop": whole,
            "own": remat.checkpoint,
            "own, matmuls kept": functools.partial(remat.checkpoint, policy=remat.save_matmuls()),
            "nested": lambda f, *args: remat.checkpoint(lambda *inner: drop_in(f, *inner), *args),
        }

    def check_model(self, name: str) -> None:
        make, batch = MODELS[name]
        expected = train(make, plain, batch)
        with remat.installed():
            for way, run in self.ways().items():
                before = remat.counters()["recomputes"]
                with self.subTest(way), self.assertWarnsOnce():
                    self.check_equal(train(make, run, batch), expected, way)
                self.assertGreaterEqual(remat.counters()["recomputes"] - before, 30)

    def assertWarnsOnce(self) -> Any:
        """A batch norm in a region of the own interface is warned about."""
        import warnings

        return warnings.catch_warnings(record=True)

    def test_transformer(self) -> None:
        self.check_model("transformer")

    def test_resnet(self) -> None:
        self.check_model("resnet")

    def test_lstm(self) -> None:
        self.check_model("lstm")

    def test_transformers_gpt2(self) -> None:
        try:
            import transformers
        except ImportError:
            self.skipTest("no transformers")
        config = transformers.GPT2Config(
            n_layer=3, n_head=2, n_embd=16, vocab_size=32, n_positions=32
        )

        def losses(checkpointing: bool) -> list[torch.Tensor]:
            torch.manual_seed(1)
            model = transformers.GPT2LMHeadModel(config)
            model.train()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            all_losses = []
            for step in range(10):
                tokens = torch.randint(0, 32, (2, 12), generator=seeded(step))
                optimizer.zero_grad()
                loss = model(tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                optimizer.step()
                all_losses.append(loss.detach())
            return all_losses + [p.detach() for p in model.parameters()]

        expected = losses(False)
        before = remat.counters()["recomputes"]
        with remat.installed():
            self.check_equal(losses(True), expected)
        self.assertEqual(remat.counters()["recomputes"] - before, 30)


DISTRIBUTED = """
import os, sys, tempfile, torch, torch.multiprocessing as mp, torch.distributed as dist
import remat
from torch import nn
from torch.utils.checkpoint import checkpoint

def model(run):
    torch.manual_seed(1)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(),
                                                      nn.Dropout(0.1)) for _ in range(4))
        def forward(self, x):
            for layer in self.layers:
                x = run(layer, x)
            return x
    return Net()

def worker(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
    remat.install()
    found = []
    ways = [lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False), lambda f,
            x: remat.checkpoint(f, x)]
    for run in ways:
        net = nn.parallel.DistributedDataParallel(model(run))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
        found.append([p.detach().clone() for p in net.parameters()])
    same = all(torch.equal(a, b) for way in found[1:] for a, b in zip(found[0], way))
    said = f"rank {rank} {'same' if same else 'DIFFERENT'} {remat.counters()['recomputes']}\\n"
    os.write(1, said.encode())  # in one piece: both processes write to this pipe
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        processes = [context.Process(target=worker,
                                     args=(rank, folder + "/store")) for rank in range(2)]
        for each in processes: each.start()
        for each in processes: each.join()
        print("exit", [each.exitcode for each in processes])
"""


FULLY_SHARDED = """
import os, sys, tempfile, torch, torch.multiprocessing as mp, torch.distributed as dist
import remat
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run
        layer = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1),
                                      nn.Linear(16, 8))
        self.layers = nn.ModuleList(layer() for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = x + self.run(layer, x)
        return x

def train(run, mesh, prepare=lambda net: None):
    torch.manual_seed(1)
    net = Net(run)
    prepare(net)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + [p.full_tensor().detach() for p in net.parameters()]

def worker(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    theirs = lambda f, x: checkpoint(f, x, use_reentrant=False)
    plain = lambda f, x: f(x)
    expected = train(plain, mesh)
    found = {"upstream": train(theirs, mesh)}
    with remat.installed():
        found["drop-in"] = train(theirs, mesh)
    found["own"] = train(remat.checkpoint, mesh)
    found["apply"] = train(plain, mesh, lambda net: remat.apply(net, names="layers.*"))
    other = [way for way, each in found.items() if not all(map(torch.equal, each, expected))]
    said = f"rank {rank} other: {other} recomputes: {remat.counters()['recomputes']}\\n"
    os.write(1, said.encode())  # in one piece: both processes write to this pipe
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        processes = [context.Process(target=worker,
                                     args=(rank, folder + "/store")) for rank in range(2)]
        for each in processes: each.start()
        for each in processes: each.join()
        print("exit", [each.exitcode for each in processes])
"""


class Distributed(Case):
    @whole
    def test_two_processes_with_gradients_in_common(self) -> None:
        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            self.skipTest("no Gloo")
        done = run_script(DISTRIBUTED)
        self.assertEqual(done.stdout.count("same 80"), 2, done.stdout)
        self.assertIn("exit [0, 0]", done.stdout)

    def test_parameters_in_shards(self) -> None:
        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            self.skipTest("no Gloo")
        try:
            from torch.distributed.fsdp import fully_shard  # noqa: F401
        except ImportError:
            self.skipTest("this torch has no fully_shard")
        done = run_script(FULLY_SHARDED, timeout=300)
        self.assertEqual(done.stdout.count("other: [] recomputes: 120"), 2, done.stdout)
        self.assertIn("exit [0, 0]", done.stdout)


if __name__ == "__main__":
    unittest.main()
