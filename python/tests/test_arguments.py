"""Arguments of wrong types: refused at the call, by name, with the given value and a hint."""

from __future__ import annotations

import inspect
import tempfile
import unittest
from typing import Any, Callable

import torch

import remat
from common import Case

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
x = torch.ones(2, 2, requires_grad=True)
cost = remat.ChainCost(stages=(remat.StageCost(), remat.StageCost()))
WRONG = object()  # of no type that an argument could have


def block(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


class Place:
    def store(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    load = store


# Each public function with right arguments; the arguments that no check of a type can refuse are in
# NOT_CHECKED.
RIGHT: dict[str, tuple[Any, ...]] = {
    "Checkpointed": (model,), "apply": (model, "every=1,name=0"), "remove": (model,),
    "is_checkpointed": (model,),
    "plain_class": (model,), "set_checkpointing": (model, True), "set_checkpoint_level": (model, 1),
    "unused_regions": (model, x * 1), "reset_unused_regions": (model,),
    "ModuleChoice.parse": ("every=2,name=a",),
    "policy_table": ({"*": "save"},), "Policy.parse": ("* = save",), "register_tree": (model,),
    "early_stop": (True,), "checkpoint_level": (1,), "debug": (), "recompute_cache": (),
    "memory_limit": (1,), "preserve_generator": (torch.Generator(),), "observe_recomputes": (),
    "save_on_cpu": (), "save_in_tiers": (), "save_on_disk": (tempfile.gettempdir(),),
    "save_elsewhere": (Place(),), "save_as": (torch.bfloat16,),
    "disable_saved_tensors_hooks": ("text",), "Recorder": (), "Recorder.write_html": (WRONG, "x"),
    "Recorder.write_memory_svg": (WRONG, "x"), "Recorder.write_chrome_trace": (WRONG, "x"),
    "free_bytes": (),
    "MemoryMeter": (), "saved_tensors": (x * 1,), "regions_of": (x * 1,),
    "track_origins": (model,), "bytes_by_module": ([],),
    "save_matmuls": (), "save_collectives": (), "save_random": (),
    "save_nondeterministic": (), "save_host_copies": (), "save_effects": (),
    "save_unrepeatable": (), "register_effect": ("aten::_assert_async",),
    "save_ops": (["aten::mm"],), "offload_ops": (["aten::mm"],),
    "save_names": (["a"],), "save_all_but_names": (["a"],), "offload_names": (["a"],),
    "Policy": (lambda c: True,),
    "Plan": (2,), "Plan.parse": ("[1]",), "revolve_plan": (3, 2), "mixed_plan": (3, 2),
    "balanced_plan": (3, 2),
    "torch_sequential_plan": (3, 2), "halving_plan": (3,), "solve": (cost,),
    "simulate": (cost, remat.Plan(2)),
    "measure": (model, x), "free_budget": (cost,), "run": (remat.Plan(2), model, x),
    "checkpoint_sequential": (model, 1, x), "fit": (model, x, 1 << 30),
    "Frontier.plan": (remat.solve(cost), 1 << 30),
    "GeneratorTracker": (), "GeneratorTracker.add": (remat.GeneratorTracker(), "a", 1),
    "GeneratorTracker.fork": (remat.GeneratorTracker(), "a"),
    "budget": (1,), "install": (), "installed": (), "ValueComparison": (), "MoveOptions": (),
    "custom_function": (torch.sin, torch.sin, torch.sin),
}  # fmt: skip
NOT_CHECKED = {
    "bytes_by_module": {"saved", "model", "optimizer"},
    "save_elsewhere": {"place"}, "Plan": {"regions", "moved"}, "fit": {"model_or_stages"},
    "ValueComparison": {"nan"},
}  # fmt: skip
# Functions of other kinds: without arguments that have a type, of classes that have no constructor
# of their own, ...
OTHERS = {
    "checkpoint", "checkpointed", "Checkpointing", "checkpoint_name", "pin", "save_region",
    "state_provider",  # these are below
    "counters", "current_phase", "is_checkpointing", "is_checkpointing_disabled", "is_recomputing",
    "default_options", "set_default_options", "disable_checkpoint", "unseen", "graph_exec_group",
    "is_installed", "uninstall", "record_allocations", "MemoryLimit", "RegionHandle",
    "CustomFunction", "served",
}  # fmt: skip


def parameters(function: Any) -> list[str]:
    signature = inspect.signature(function.__init__ if isinstance(function, type) else function)
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        each.name
        for each in signature.parameters.values()
        if each.name != "self" and each.kind not in kinds
    ]


def found(name: str) -> Any:
    owner, _, method = name.partition(".")
    return getattr(getattr(remat, owner), method) if method else getattr(remat, name)


def refused(call: Callable[[], Any]) -> str:
    """Returns the text of the TypeError; of a guard, before it is entered."""
    try:
        call()
    except TypeError as error:
        return str(error)
    return "accepted"


class Arguments(Case):
    def test_every_argument_of_every_public_function_is_refused_by_name(self) -> None:
        for name, right in RIGHT.items():
            names = NATIVE.get(name) or parameters(found(name))
            for position, argument in enumerate(names):
                if argument in NOT_CHECKED.get(name, ()):
                    continue
                self_ = right[:1] if "." in name and right[0] is not None and name in BOUND else ()
                given = right[len(self_):]
                with self.subTest(function=name, argument=argument):
                    if position < len(given):
                        args, kwargs = (*given[:position], WRONG, *given[position + 1 :]), {}
                    else:
                        args, kwargs = given, {argument: WRONG}
                    text = refused(lambda: found(name)(*self_, *args, **kwargs))
                    self.assertRegex(
                        text, rf"^remat\.{name}: {argument} must be .+, got .*<object object"
                    )

    def test_no_public_function_is_forgotten(self) -> None:
        functions = {name for name in remat.__all__ if callable(getattr(remat, name))}
        made_by_the_package = {
            name
            for name in functions
            if isinstance(getattr(remat, name), type) and name not in RIGHT
        }
        self.assertEqual(functions - made_by_the_package - set(RIGHT) - OTHERS, set())

    def test_flags_are_flags(self) -> None:
        for wrong in ("no", 1, None, 0.0, torch.tensor(True)):
            for option in (
                "early_stop", "offload_inputs", "preserve_rng_state", "strict_unpack", "debug"
            ):
                pattern = rf"remat\.checkpoint: {option} must be True or False, got "
                with self.subTest(option=option, wrong=wrong):
                    self.assertRegex(
                        refused(lambda: remat.checkpoint(block, x, **{option: wrong})), pattern
                    )
                    self.assertRegex(refused(lambda: remat.checkpoint(**{option: wrong})), pattern)
                    self.assertRegex(
                        refused(lambda: remat.Checkpointed(model, **{option: wrong})), pattern
                    )
                    self.assertRegex(
                        refused(lambda: remat.run(remat.Plan(2), model, x, **{option: wrong})),
                        pattern,
                    )
        self.assertFalse(remat.is_checkpointed(model))

    def test_what_is_right_is_taken(self) -> None:
        class Index:
            def __index__(self) -> int:
                return 2

        remat.recompute_cache(max_bytes=Index())  # type: ignore[arg-type]
        remat.checkpoint_level(Index())  # type: ignore[arg-type]
        remat.save_names(name for name in ("a", "b"))
        remat.save_names({"a": 1})
        remat.save_on_disk(b"".decode() or tempfile.gettempdir())
        remat.ValueComparison(absolute_tolerance=1)
        remat.checkpoint(block, x, modules=model)  # what one iterates over
        self.assertEqual(remat.simulate(cost, remat.Plan(2), frame_cost_s=1).frames, 0)

    def test_bytes_are_whole_numbers_of_any_type(self) -> None:
        self.assertEqual(repr(remat.memory_limit(8e9)), "remat.memory_limit(8000000000)")
        self.assertEqual(remat.MoveOptions(min_bytes=1e6), remat.MoveOptions(min_bytes=10**6))
        self.assertIs(type(remat.MoveOptions(min_bytes=1e6).min_bytes), int)
        frontier = remat.solve(cost)
        self.assertEqual(frontier.plan(2.0**30), frontier.plan(1 << 30))
        fitted = remat.fit([block, lambda t: t.sum()], x, budget_bytes=1e9, repeats=1)
        self.assertEqual((fitted.budget_bytes, type(fitted.budget_bytes)), (10**9, int))
        guards: tuple[Callable[[Any], Any], ...] = (
            lambda n: remat.save_on_cpu(min_bytes=n, max_bytes_in_flight=n),
            lambda n: remat.save_on_disk(tempfile.gettempdir(), min_bytes=n),
            lambda n: remat.save_in_tiers(device_bytes=n, host_bytes=n, min_bytes=n,
                                          directory=tempfile.gettempdir(), max_bytes_in_flight=n),
            lambda n: remat.save_elsewhere(Place(), min_bytes=n, max_bytes_in_flight=n),
            lambda n: remat.save_as(torch.bfloat16, min_bytes=n),
            lambda n: remat.recompute_cache(n),
            lambda n: remat.memory_limit(n),
        )  # fmt: skip
        for guard in guards:
            with guard(1e12):
                pass
            for wrong in (0.5, float("nan"), float("inf"), True, "1"):
                self.assertRegex(
                    refused(lambda: guard(wrong)),
                    "bytes.* must be a whole number of bytes.*, got ",
                )
        limits = {"min_offload_bytes": 1e6, "max_bytes_in_flight": 1e6}
        for policy in (
            remat.offload_ops(["aten::mm"], **limits),  # type: ignore[arg-type]
            remat.offload_names(["a"], **limits),  # type: ignore[arg-type]
            remat.Policy(block, **limits),  # type: ignore[arg-type]
        ):
            self.assertIn("min_offload_bytes=1000000", repr(policy))
        self.assertEqual(
            refused(lambda: remat.fit(model, x, 1.5)),
            "remat.fit: budget_bytes must be a whole number of bytes, got 1.5",
        )
        whole, other = (
            remat.ChainCost(
                stages=(remat.StageCost(1.0, 1.0, output_bytes=n), remat.StageCost(output_bytes=4))
            )
            for n in (80, 80.0)
        )
        self.assertEqual(remat.simulate(other, remat.Plan(2)), remat.simulate(whole, remat.Plan(2)))
        half = remat.StageCost(saved_bytes=0.5)  # type: ignore[arg-type]
        wrong = remat.ChainCost(stages=(half,))
        self.assertEqual(
            refused(lambda: remat.solve(wrong)),
            "remat.StageCost: saved_bytes must be a whole number of bytes, got 0.5",
        )

    def test_other_options_of_checkpoint(self) -> None:
        for option, wrong, wanted in (
            ("name", 3, "a str"), ("level", True, "an int or None"),
            ("level", "2", "an int or None"),
            ("offload_prefetch_depth", True, "an int"), ("offload_prefetch_depth", 2.0, "an int"),
            ("determinism_check", 3, "a str"), ("modules", 3, "a list of modules"),
            ("modules", torch.nn.Linear(2, 2), "a list of modules"),
        ):  # fmt: skip
            with self.subTest(option=option, wrong=wrong):
                pattern = rf"remat\.checkpoint: {option} must be {wanted}, got "
                self.assertRegex(
                    refused(lambda: remat.checkpoint(block, x, **{option: wrong})), pattern
                )
                self.assertRegex(refused(lambda: remat.checkpoint(**{option: wrong})), pattern)
        self.assertIn(
            "there is no option 'erly_stop'", refused(lambda: remat.checkpoint(erly_stop=False))
        )
        self.assertIn(
            "there is no option 'erly_stop'",
            refused(lambda: remat.Checkpointed(model, erly_stop=False)),
        )

    def test_what_is_no_function_is_no_region(self) -> None:
        for call in (lambda: remat.checkpoint(3),  # type: ignore[call-overload]
                     lambda: remat.checkpoint(3, x)):  # type: ignore[call-overload]
            self.assertEqual(
                refused(call), "remat.checkpoint: the function must be a function or a module, "
                               "got 3"
            )
        self.assertIn(
            "must be a function or a module, got 3",
            refused(lambda: remat.checkpoint()(3)),  # type: ignore
        )
        for call in (
            lambda: remat.checkpoint(torch.nn.Linear, 2, 2),
            lambda: remat.checkpoint()(torch.nn.Linear),
        ):
            self.assertRegex(
                refused(call),
                r"got the class Linear\. Hint: pass remat\.Checkpointed\(Linear\(\.\.\.\)\)",
            )
        self.assertEqual(
            refused(lambda: remat.save_region(3)),  # type: ignore[arg-type]
            "remat.save_region: the function must be a function, got 3",
        )
        self.assertIn(
            "stage 2 must be a function or a module, got 3",
            refused(lambda: remat.measure([block, 3], x)),  # type: ignore
        )
        self.assertIn("the stages must be a list of functions",
                      refused(lambda: remat.fit(3, x, 1)))  # type: ignore

    def test_what_is_no_module_is_not_checkpointed(self) -> None:
        self.assertEqual(
            refused(lambda: remat.Checkpointed(3)),  # type: ignore[type-var]
            "remat.Checkpointed: module must be a torch.nn.Module, got 3",
        )
        self.assertRegex(
            refused(lambda: remat.Checkpointed(torch.nn.Linear)),  # type: ignore[type-var]
            r"got the class Linear\. Hint: pass a module, Linear\(\.\.\.\)",
        )
        self.assertIn(
            "decorate the function with @remat.checkpoint()",
            refused(lambda: remat.Checkpointed(block)),  # type: ignore[type-var]
        )

    def test_a_decorator_without_parentheses_says_so(self) -> None:
        def decorated() -> None:
            @remat.checkpoint
            def head(x: torch.Tensor) -> torch.Tensor:
                return x

        text = refused(decorated)
        self.assertIn(
            "remat.checkpoint: head was called without arguments: missing a required argument: 'x'",
            text,
        )
        self.assertIn("@remat.checkpoint() above the function", text)

        def missing() -> None:
            raise TypeError("my own")

        # The error came from inside.
        self.assertEqual(refused(lambda: remat.checkpoint(missing)), "my own")
        self.assertIn("forward() missing", refused(lambda: remat.checkpoint(model)))  # torch's
        self.assertEqual(remat.checkpoint(lambda: 3), 3)

        @remat.checkpoint()
        def tail(x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        before = remat.counters()["frames_created"]
        tail(x).sum().backward()
        self.assertEqual(remat.counters()["frames_created"], before + 1)
        for guard in (remat.early_stop, remat.debug, remat.recompute_cache):
            self.assertRegex(refused(lambda: guard(block)), "a decorator needs its arguments in "
                                                            r"parentheses: @remat\.")

    def test_a_decorator_reads_its_modules_in_each_call(self) -> None:
        norm = torch.nn.BatchNorm1d(2)

        @remat.checkpoint(modules=(each for each in [norm]))
        def f(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = norm(x)
            return y.sin()

        for _ in range(2):
            f(x).sum().backward()
        self.assertEqual(int(norm.num_batches_tracked), 2)

    def test_a_name_is_no_list_of_names(self) -> None:
        self.assertEqual(
            refused(lambda: remat.save_names("up")),
            "remat.save_names: names must be a list of names, got 'up'. Hint: pass ['up'].",
        )
        self.assertIn("Hint: pass ['aten::mm']", refused(lambda: remat.save_ops("aten::mm")))

    def test_tensors_and_providers(self) -> None:
        self.assertEqual(refused(lambda: remat.pin(3)), "remat.pin: x must be a torch.Tensor, "
                                                        "got 3")  # type: ignore
        self.assertIn(
            "name must be a str, got 3",
            refused(lambda: remat.checkpoint_name(x, 3)),  # type: ignore
        )
        self.assertIn(
            "an object with `capture` and `restore`, got 3",
            refused(lambda: remat.state_provider(3)),  # type: ignore
        )


# Functions of the extension do not say what their arguments are called.
NATIVE = {
    "Plan": ["stages"], "Plan.parse": ["text"], "revolve_plan": ["stages", "snapshots"],
    "mixed_plan": ["stages", "units"], "balanced_plan": ["stages", "segments"],
    "torch_sequential_plan": ["stages", "segments"], "halving_plan": ["stages"],
    "MemoryMeter": ["device"],
}  # fmt: skip
BOUND = {
    "GeneratorTracker.add", "GeneratorTracker.fork", "Recorder.write_html",
    "Recorder.write_memory_svg", "Recorder.write_chrome_trace", "Frontier.plan",
}  # fmt: skip

if __name__ == "__main__":
    unittest.main()
