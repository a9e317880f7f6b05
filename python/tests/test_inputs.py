"""Arguments and captured tensors of a region: kept, copied, compared, and their hooks."""

from __future__ import annotations

import collections
import gc
import time
import unittest
import weakref
from typing import Any, Callable

import torch

import remat
from common import Case, gradient, leaf, operators


class Arguments(Case):
    def test_leaves_are_the_same_objects(self) -> None:
        seen: list[object] = []
        parameter = torch.nn.Parameter(torch.ones(4))
        parameter.mark = "mine"  # type: ignore[attr-defined]

        def f(p: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
            seen.append((p, plain))
            return (p * plain).sin().exp()

        constant = torch.ones(4)
        gradient(remat.checkpoint(f, parameter, constant), parameter)
        self.assertEqual(len(seen), 2)
        for each in seen:
            self.assertIs(each[0], parameter)  # type: ignore[index]
            self.assertIs(each[1], constant)  # type: ignore[index]

    def test_results_keep_class_and_attributes(self) -> None:
        class Marked(torch.Tensor):
            pass

        for kind in (torch.Tensor, Marked):
            x = torch.ones(4).as_subclass(kind).requires_grad_()
            middle = x * 2
            middle.mark = "mine"  # type: ignore[attr-defined]
            seen = []

            def f(t: torch.Tensor) -> torch.Tensor:
                seen.append((type(t), getattr(t, "mark", None), t.requires_grad, t.is_leaf))
                return t.sin().exp()

            gradient(remat.checkpoint(f, middle), x)
            self.assertEqual(seen, [(kind, "mine", True, False)] * 2)

    def test_tensors_of_wrapping_classes(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        def step(call: object, chained: bool) -> tuple[torch.Tensor, torch.Tensor]:
            x = TwoTensor(torch.ones(3, 3) * 0.3, torch.ones(3, 3) * 0.4).requires_grad_()
            y = call((x * 1) if chained else x)  # type: ignore[operator]
            y.sum().backward()
            return x.grad.a, x.grad.b

        f = lambda t: (t @ t).sin().exp().sin()  # noqa: E731
        policies = [
            None, remat.save_matmuls(), remat.save_ops(["aten::sin", "aten::exp"]),
            remat.save_ops(["aten::bmm"])
        ]
        for policy in policies:
            for chained in (False, True):
                ours = step(lambda t: remat.checkpoint(f, t, policy=policy), chained)
                self.check_equal(ours, step(f, chained))

    def test_arguments_that_are_no_tensors_stay_what_they_are(self) -> None:
        x = leaf()
        marker, seen = object(), []
        remat_call = remat.checkpoint(
            lambda t, m, items: (seen.append((m, items)), t.sin().exp())[1], x, marker, [x]
        )
        gradient(remat_call, x)
        self.assertTrue(all(m is marker and items[0] is x for m, items in seen))

    def test_containers_may_change_after_the_call(self) -> None:
        a, b, w = leaf(), leaf(seed=1), leaf(seed=2)

        class Features:
            def __init__(self) -> None:
                self.all = [a * 2]

        def total(features: Any) -> torch.Tensor:
            found: list[torch.Tensor] = []
            torch.utils._pytree.tree_map_only(torch.Tensor, found.append, features)
            return (sum(found) * w).sin()

        makers: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "append": (lambda: [a * 2], lambda features: features.append(b)),
            "pop": (lambda: [a * 2, a], lambda features: features.pop()),
            "a leaf replaced": (lambda: [a], lambda features: features.__setitem__(0, b)),
            "replaced": (lambda: [a * 2], lambda features: features.__setitem__(0, b * 2)),
            "dictionary": (lambda: {"x": a}, lambda features: features.update(x=b, y=b)),
            "in a tuple": (lambda: (a, [a.sin()], "text"), lambda features: features[1].append(b)),
            "deep": (lambda: [{"x": ([a],)}], lambda features: features[0]["x"][0].append(b)),
            "ordered": (
                lambda: collections.OrderedDict(x=a), lambda features: features.update(x=b)
            ),
            "default": (
                lambda: collections.defaultdict(list, x=[a]),
                lambda features: features["x"].append(b),
            ),
            "deque": (lambda: collections.deque([a]), lambda features: features.append(b)),
        }
        for name, (make, change) in makers.items():
            for with_keyword in (False, True):
                with self.subTest(name, with_keyword=with_keyword):
                    plain = gradient(total(make()), a, w)
                    features = make()
                    if with_keyword:
                        result = remat.checkpoint(
                            lambda *, features: total(features), features=features
                        )
                    else:
                        result = remat.checkpoint(total, features)
                    change(features)
                    for _ in range(2):
                        for one, other in zip(plain, gradient(result, a, w, retain_graph=True)):
                            self.assertTrue(torch.equal(one, other))

    def test_functions_may_change_containers(self) -> None:
        x, w = leaf(), leaf(seed=1)

        def block(x: torch.Tensor, losses: list[torch.Tensor], seen: set[int]) -> torch.Tensor:
            self.assertEqual((len(losses), len(seen)), (0, 0))
            losses.append((x * w).exp().sum())
            seen.add(1)
            return (x * w).sin() * losses[0]

        losses: list[torch.Tensor] = []
        seen: set[int] = set()
        result = remat.checkpoint(block, x, losses, seen)
        self.assertEqual((len(losses), seen), (1, {1}))  # the caller's own
        seen.add(2)
        plain = gradient(block(x, [], set()), x, w)
        for _ in range(2):
            for one, other in zip(plain, gradient(result, x, w, retain_graph=True)):
                self.assertTrue(torch.equal(one, other))
        self.assertEqual((len(losses), seen), (1, {1, 2}))

    def test_containers_keep_their_shape(self) -> None:
        x = leaf()
        shared = [x * 1]
        cyclic: list[Any] = [x]
        cyclic.append(cyclic)
        size = x.size()

        def check(first: Any, again: Any, cyclic: Any, size: Any, text: Any) -> torch.Tensor:
            self.assertIs(first["a"], again[0])
            self.assertIs(cyclic[1], cyclic)
            self.assertEqual((list(first), type(size), text), (["b", "a"], torch.Size, ("text", 1)))
            return (first["a"][0] * cyclic[0]).sin()

        result = remat.checkpoint(
            check, {"b": 1, "a": shared}, (shared,), cyclic, size, ("text", 1)
        )
        (found,) = gradient(result, x)
        (plain,) = gradient((x * x).sin(), x)
        torch.testing.assert_close(found, plain)
        kept = weakref.ref(shared[0])
        del result, found, shared
        cyclic.clear()
        gc.collect()
        self.assertIsNone(kept())

    def test_one_tensor_twice_is_one_tensor(self) -> None:
        x = leaf()
        seen = []
        f = lambda a, b: (seen.append(a is b), (a * b).sin().exp())[1]  # noqa: E731
        gradient(remat.checkpoint(f, x * 1, x), x)
        y = x * 1
        gradient(remat.checkpoint(f, y, y), x)
        self.assertEqual(seen, [False, False, True, True])

    def test_a_region_does_not_keep_the_graph_above(self) -> None:
        x = leaf()
        middle = x.sin()
        node = middle.grad_fn
        kept = remat.checkpoint(lambda t: t.exp().sin().detach(), middle)
        alive = remat.counters()["frames_alive"]
        self.assertEqual(alive, 0)
        del middle, node, kept

    def test_a_changed_argument_is_an_error(self) -> None:
        x = leaf()
        y = x * 1
        z = remat.checkpoint(operators, y)
        with torch.no_grad():
            y.add_(1)
        with self.assertRaisesRegex(
            remat.CheckpointError, "modified by an inplace operation"
        ) as caught:
            gradient(z, x)
        self.assertIs(caught.exception.kind, remat.ErrorKind.INPUT_CHANGED)

    def test_an_argument_whose_memory_was_freed_is_an_error(self) -> None:
        x = leaf()
        between = x * 1
        y = remat.checkpoint(lambda t: (t * 1).sin().exp(), between)
        between.untyped_storage().resize_(0)
        with self.assertRaises(remat.CheckpointError) as raised:
            y.sum().backward()
        self.assertEqual(raised.exception.kind, remat.ErrorKind.INPUT_CHANGED)

    def test_an_argument_that_the_function_fills_before_it_reads(self) -> None:
        for options in ({"capture_check": "ignore"}, {"input_mode": "copy_on_write"}):
            for make in (lambda x: x * 2, lambda x: x.detach() * 2):  # with a history, and without
                x = leaf()
                between = make(x)
                kept: list[torch.Tensor] = []

                def fill(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
                    storage = t.untyped_storage()
                    if storage.size() == 0:
                        storage.resize_(kept[0].untyped_storage().size())
                        storage.copy_(kept[0].untyped_storage())
                    return (x * t).sin().exp()

                expected = gradient(fill(x, make(x)), x)
                y = remat.checkpoint(fill, x, between, **options)
                kept.append(between.detach().clone())
                between.untyped_storage().resize_(0)
                self.check_equal(gradient(y, x, retain_graph=True), expected)
                self.check_equal(gradient(y, x), expected)

    def test_running_statistics_as_arguments(self) -> None:
        def f(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
            centred = x - mean  # reads what the norm moves
            return torch.nn.functional.batch_norm(x, mean, variance, training=True).sin() * centred

        x = torch.randn(6, 2, requires_grad=True)
        plain = torch.zeros(2), torch.ones(2)
        expected = gradient(f(x, *plain), x)
        own = torch.zeros(2), torch.ones(2)
        text = '(?s)running statistics.*input_mode="copy_on_write"'
        with self.assertRaisesRegex(remat.CheckpointError, text) as caught:
            gradient(remat.checkpoint(lambda *all: f(*all), x, *own), x)
        self.assertIs(caught.exception.kind, remat.ErrorKind.INPUT_CHANGED)
        own = torch.zeros(2), torch.ones(2)
        y = remat.checkpoint(f, x, *own, input_mode="copy_on_write")
        for _ in range(2):
            self.check_equal(gradient(y, x, retain_graph=True), expected)
        self.check_equal(own, plain)

    def test_wrapping_classes_as_copies(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        def gradients(
            around: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor],
        ) -> torch.Tensor:
            torch.manual_seed(0)
            a = torch.randn(4, 4)
            x = TwoTensor(a, a * 2).requires_grad_()
            around(lambda t: (t @ t).sin(), x).sum().backward()
            return x.grad.a + x.grad.b

        expected = gradients(lambda f, x: f(x))
        for around in (lambda f, x: remat.checkpoint(f, x, input_mode="copy_on_write"),
                       lambda f, x: remat.checkpoint_sequential([f], 1, x),
                       lambda f, x: remat.checkpoint(
                           lambda t: remat.checkpoint(f, t), x)):  # fmt: skip
            self.check_equal(gradients(around), expected)
        twice = gradients(lambda f, x: f(f(x)))
        self.check_equal(gradients(lambda f, x: remat.checkpoint_sequential([f, f], 2, x)), twice)

    def test_views_of_jagged_arguments_are_inputs(self) -> None:
        parts = [torch.randn(n, 8, requires_grad=True) for n in (3, 5)]

        def attention(n: torch.Tensor) -> torch.Tensor:
            heads = n.unflatten(-1, [2, 4]).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)

        def jagged() -> torch.Tensor:
            return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

        def found(region: Callable[..., torch.Tensor], f: Any, n: torch.Tensor) -> Any:
            y = region(f, n)
            return torch.autograd.grad((y.values() if y.is_nested else y).sum(), parts)

        functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda n: n.sin().values().exp(),
            lambda n: n.unflatten(-1, [2, 4]).sin(),
            lambda n: n.unflatten(-1, [2, 4]).transpose(1, 2).transpose(1, 2).sin(),
            lambda n: n.values().sin() * n.values(),
            attention,
            # `_values` is the tensor inside, which has a history of its own.
            lambda n: n.unflatten(-1, [2, 4])._values.sin(),
            lambda n: n.view(2, -1, 2, 4)._values.exp(),
            lambda n: n._values.exp() + n._values,
        ]
        for number, f in enumerate(functions):
            # Tensors that autograd makes below itself have a tensor inside without a history.
            makes = (jagged, lambda: jagged() * 2) if number < 5 else (jagged,)
            for make in makes:
                with self.subTest(number=number):
                    expected = found(lambda f, n: f(n), f, make())
                    self.check_equal(found(remat.checkpoint, f, make()), expected)
                    twice = lambda t, f=f: remat.checkpoint(f, t)  # noqa: E731
                    self.check_equal(found(remat.checkpoint, twice, make()), expected)

    def test_a_captured_jagged_tensor_that_changed_is_an_error(self) -> None:
        x = leaf(8, 8)
        values = torch.randn(8, 8)
        for changes_values in (True, False):
            n = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 8]))
            y = remat.checkpoint(
                lambda t: (t * n.unflatten(-1, [2, 4]).values().flatten(1)).sin(), x
            )
            (values if changes_values else n.values()).add_(1)
            with self.assertRaises(remat.CheckpointError) as caught:
                gradient(y, x)
            self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)

    def test_containers_keep_their_identity(self) -> None:
        x = leaf()
        shared: dict[str, Any] = {"list": [1], "set": {1}, "dict": {1: [2]},
                                  "deque": collections.deque([1]),
                                  "default": collections.defaultdict(list, {1: [2]}),
                                  "tuple": ([1],)}  # fmt: skip
        ring: list[Any] = [1]
        ring.append((ring, [ring]))
        runs = 0

        def f(t: torch.Tensor, first: Any, second: Any, ring: Any, *, third: Any) -> torch.Tensor:
            nonlocal runs
            runs += 1
            for name, each in shared.items():
                self.assertIs(first[name], second[0][name])
                self.assertIs(first[name], third[name][0])
                if runs > 1:
                    self.assertIsNot(first[name], each)
                self.assertEqual(first[name], each)
            self.assertIs(ring[1][0], ring)
            self.assertIs(ring[1][1][0], ring)
            return t.sin().exp()

        y = remat.checkpoint(
            f, x, dict(shared), [shared], ring,
            third={name: [each] for name, each in shared.items()}
        )
        gradient(y, x)
        self.assertEqual(runs, 2)

    def test_many_small_containers_cost_what_they_weigh(self) -> None:
        x = leaf()

        def seconds(count: int) -> float:
            for container in (
                [[i] for i in range(count)], [([i],) for i in range(count)],
                {i: {i: i} for i in range(count)}
            ):
                begin = time.process_time()
                gradient(remat.checkpoint(lambda t, _: t.sin().exp(), x, container), x)
                total = time.process_time() - begin
            return total

        small = min(seconds(2000) for _ in range(3))
        # The tensors are 32 times as many; comparisons of all pairs would be a thousand times as
        # many.
        self.assertLess(seconds(64000), 150 * small)

    def test_functions_that_write_to_their_arguments(self) -> None:
        x = leaf()
        relu = torch.nn.ReLU(inplace=True)
        f = lambda t: relu(t).sin().exp()  # noqa: E731
        plain = gradient(f(x * 1), x)
        self.check_equal(gradient(remat.checkpoint(f, x * 1, input_mode="copy_on_write"), x), plain)
        with self.assertRaises(remat.CheckpointError):
            gradient(remat.checkpoint(f, x * 1), x)

    def test_a_changed_parameter_is_an_error(self) -> None:
        x, w = leaf(seed=1), leaf(seed=2)
        f = lambda t: (t * w).sin().exp()  # noqa: E731
        y = remat.checkpoint(f, x, name="mine")
        with torch.no_grad():
            w.add_(1)
        with self.assertRaisesRegex(remat.CheckpointError, "mine") as caught:
            gradient(y, x, retain_graph=True)
        self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
        y = remat.checkpoint(f, x, capture_check="ignore")
        with torch.no_grad():
            w.add_(1)
        self.check_equal(gradient(y, x), gradient(f(x), x))

    def test_a_changed_bias_that_nothing_saved_is_an_error(self) -> None:
        layer = torch.nn.Linear(4, 4)
        x = torch.randn(2, 4)  # needs no gradient: neither weight nor bias is saved
        for changed in (layer.weight, layer.bias):
            y = remat.checkpoint(lambda t: layer(t).relu().exp(), x, modules=[layer])
            alone = remat.checkpoint(layer, x)  # nothing that is saved depends on them
            with torch.no_grad():
                changed.add_(1)
            with self.assertRaisesRegex(remat.CheckpointError, "does not save") as caught:
                y.sum().backward()
            self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
            alone.sum().backward()

    def test_fast_weights_that_are_replaced_are_those_of_forward_or_an_error(self) -> None:
        x, first = leaf(seed=1), leaf(seed=2)

        def after_two_steps(
            around: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor],
            way: str,
        ) -> torch.Tensor:
            w, held = first, [first]
            try:
                for _ in range(2):
                    function = {"value": lambda t, w=w: (t * w).sin(),
                                "closure": lambda t: (t * w).sin(),
                                "list": lambda t: (t * held[0]).sin()}[way]  # fmt: skip
                    step, = torch.autograd.grad(around(function, x).sum(), w, create_graph=True)
                    w = held[0] = w - 0.1 * step
                return gradient((x * w).sin(), first)
            finally:
                w = held[0] = first  # what a closure owns of its own graph is a cycle

        plain = after_two_steps(lambda f, t: f(t), "value")
        for way in ("value", "closure"):
            self.check_equal(after_two_steps(remat.checkpoint, way), plain)
        with self.assertRaises(remat.CheckpointError) as caught:
            after_two_steps(remat.checkpoint, "list")
        self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)


    def test_another_leaf_in_the_place_of_a_captured_one_is_an_error(self) -> None:
        x = leaf(seed=1)
        for other, is_error in ((leaf(seed=3), True), (leaf(seed=2), False)):
            held = [leaf(seed=2)]
            f = lambda t: (t * held[0]).sin().exp()  # noqa: E731
            plain = gradient(f(x), x)
            y = remat.checkpoint(f, x)
            held[0] = other
            if is_error:
                with self.assertRaises(remat.CheckpointError) as caught:
                    gradient(y, x)
                self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
            else:
                self.check_equal(gradient(y, x), plain)

    def test_parameters_that_stood_in_around_forward_are_an_error(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        others = {
            name: (each.detach() + 1).requires_grad_() for name, each in model.named_parameters()
        }
        x = torch.randn(3, 8, requires_grad=True)
        remat.apply(model, names="0")
        y = torch.func.functional_call(model, others, (x,))
        with self.assertRaisesRegex(
            remat.CheckpointError, "parameter 'weight' of Linear"
        ) as caught:
            gradient(y, x, retain_graph=True)
        self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
        remat.remove(model)
        plain = gradient(torch.func.functional_call(model, others, (x,)), x)
        with_others = lambda: gradient(y, x)  # noqa: E731
        for name, each in others.items():  # with them in place again the same backward is right
            setattr(
                model.get_submodule(name.partition(".")[0]), name.partition(".")[2],
                torch.nn.Parameter(each.detach())
            )
        self.check_equal(with_others(), plain)

    def test_leaves_that_the_function_makes_are_equal_in_each_run(self) -> None:
        x = leaf(seed=1)
        for scale in (1.0, 2.0):

            def f(t: torch.Tensor) -> torch.Tensor:
                made = (t.detach() * scale).requires_grad_()
                return (made.sin() * t).exp()

            self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(f(x), x))

        # arguments that come back rounded are no other leaves
        def hooked(t: torch.Tensor) -> torch.Tensor:
            with remat.save_as(torch.bfloat16):
                return remat.checkpoint(lambda each: each.sin().exp(), t)

        gradient(hooked(x), x)


class Hooks(Case):
    """Registrations of a function on tensors from outside happen once, as in plain execution."""

    def gradients(
        self, register: Callable[[torch.Tensor], object], is_argument: bool,
        around: Callable[..., torch.Tensor], times: int = 1
    ) -> list[torch.Tensor]:
        torch.manual_seed(0)
        w, x = leaf(), leaf()

        def f(t: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
            factor = arguments[0] if is_argument else w
            register(factor)
            return (t.sin() * factor).exp()

        y = x
        for _ in range(times):
            y = around(f, y, w) if is_argument else around(f, y)
        y.sum().backward()
        assert w.grad is not None and x.grad is not None
        return [w.grad, x.grad]

    def test_hooks_on_leaves_from_outside(self) -> None:
        def node(t: torch.Tensor) -> torch.autograd.graph.Node:
            made = t.expand_as(t).grad_fn
            assert made is not None
            return made.next_functions[0][0]  # type: ignore[return-value]

        def halve(t: torch.Tensor) -> None:
            assert t.grad is not None
            t.grad.mul_(0.5)

        kinds: dict[str, Callable[[torch.Tensor], object]] = {
            "tensor": lambda t: t.register_hook(lambda g: g * 2),
            "after accumulation": lambda t: t.register_post_accumulate_grad_hook(halve),
            "before the node": lambda t: node(t).register_prehook(lambda g: (g[0] * 2,)),
            "two": lambda t: (t.register_hook(lambda g: g * 2), t.register_hook(lambda g: g + 1)),
        }
        plainly = lambda f, *arguments: f(*arguments)  # noqa: E731
        for name, register in kinds.items():
            for is_argument in (False, True):
                for times in (1, 2):
                    with self.subTest(name=name, is_argument=is_argument, times=times):
                        self.assertTrue(
                            all(
                                map(
                                    torch.equal,
                                    self.gradients(register, is_argument, remat.checkpoint, times),
                                    self.gradients(register, is_argument, plainly, times),
                                )
                            )
                        )

    def test_hooks_run_as_often_as_they_are_registered(self) -> None:
        w, x = leaf(), leaf()
        calls = []
        w.register_hook(lambda g: calls.append("before"))

        def f(t: torch.Tensor) -> torch.Tensor:
            w.register_hook(lambda g: calls.append("inside"))
            return t.sin() * w

        y = remat.checkpoint(f, x)
        w.register_hook(lambda g: calls.append("behind"))
        y.sum().backward()
        self.assertEqual(calls, ["before", "inside", "behind"])
        w.register_hook(lambda g: calls.append("later"))
        calls.clear()
        (w * 2).sum().backward()
        self.assertEqual(calls, ["before", "inside", "behind", "later"])

    def test_a_hook_that_only_a_recompute_registers_is_gone(self) -> None:
        w, x = leaf(), leaf()
        runs, calls = [], []

        def f(t: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            if len(runs) == 2:
                w.register_hook(lambda g: calls.append("recompute's"))
            return t.sin() * w

        remat.checkpoint(f, x).sum().backward()
        self.assertEqual(len(runs), 2)
        w.register_hook(lambda g: calls.append("later"))
        (w * 2).sum().backward()
        self.assertEqual(calls, ["later"])


if __name__ == "__main__":
    unittest.main()
