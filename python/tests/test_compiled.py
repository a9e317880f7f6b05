"""`remat.checkpoint` under torch.compile or an export: each program in a process of its own."""

from __future__ import annotations

import textwrap
import unittest

from common import Case, run_script, whole

BEGIN = """
import torch, torch.utils.checkpoint
import remat
torch.manual_seed(0)
w = torch.randn(4, 4, requires_grad=True)
x = torch.randn(4, 4, requires_grad=True)
function = lambda t: (t @ w).sin() @ w

def check(f, **options):
    compiled = torch.compile(f, backend="aot_eager", **options)
    for ours, theirs in zip(torch.autograd.grad(compiled(x).sum(), (x, w)),
                            torch.autograd.grad(function(x).sum(), (x, w))):
        assert torch.allclose(ours, theirs)
"""


@unittest.skipUnless(
    hasattr(__import__("torch").compiler, "substitute_in_graph"), "torch before 2.6"
)
class Compiled(Case):
    def check(self, program: str) -> None:
        found = run_script(BEGIN + textwrap.dedent(program), timeout=300)
        self.assertEqual(found.returncode, 0, found.stdout[-3000:])

    def test_the_whole_graph(self) -> None:
        self.check("""
            import sys
            assert "torch._dynamo" not in sys.modules
            seen = []
            def backend(graph, inputs):
                seen.append(str(graph.graph))
                return graph
            check(lambda t: remat.checkpoint(function, t, name="a", early_stop=False),
                  fullgraph=True)
            torch.compile(lambda t: remat.checkpoint(function, t), backend=backend,
                          fullgraph=True)(x)
            assert "tag_activation_checkpoint" in seen[0], seen
            @remat.checkpoint(name="b")
            def region(t):
                return function(t)
            check(region, fullgraph=True)
            """)

    @whole
    def test_dynamo_is_there_before(self) -> None:
        program = (
            "import torch._dynamo\n"
            + BEGIN
            + "check(lambda t: remat.checkpoint(function, t), fullgraph=True)\n"
        )
        found = run_script(program, timeout=300)
        self.assertEqual(found.returncode, 0, found.stdout[-3000:])

    @whole
    def test_what_upstream_has_not_breaks_the_graph(self) -> None:
        self.check("""
            policy = remat.save_matmuls()
            f = lambda t: remat.checkpoint(function, t, policy=policy)
            check(f)
            torch._dynamo.reset()
            try:
                check(f, fullgraph=True)
                raise AssertionError("no error")
            except torch._dynamo.exc.Unsupported as error:
                assert "remat.checkpoint: torch.compile cannot trace a region with policy" in str(
                    error), error
            """)

    def test_exports(self) -> None:
        self.check("""
            class Model(torch.nn.Module):
                def forward(self, t):
                    return remat.checkpoint(lambda t: (t @ t).sin(), t)

            class Upstreams(torch.nn.Module):
                def forward(self, t):
                    return torch.utils.checkpoint.checkpoint(lambda t: (t @ t).sin(), t,
                                                             use_reentrant=False)

            def exported(model, strict):
                try:
                    return str(torch.export.export(model, (torch.randn(4, 4),),
                                                   strict=strict).graph)
                except Exception as error:
                    return type(error).__name__ + str(error)[:30]

            for strict in (False, True):
                ours, theirs = exported(Model(), strict), exported(Upstreams(), strict)
                assert ours == theirs, (ours, theirs)
            """)


if __name__ == "__main__":
    unittest.main()
