// Rule 2: containers and other holders of tensors, as arguments and results of a region.

#include <ATen/NestedTensorImpl.h>

#include <deque>
#include <forward_list>
#include <list>
#include <set>
#include <unordered_set>

#include "tests/support/nn.h"

using remat::checkpoint;
namespace rnn = torch::nn::utils::rnn;

namespace {

Tensor sum_of_sines(const auto& all) {
  Tensor sum = at::zeros({3});
  for (const Tensor& each : all) sum = sum + each.sin().exp() * (sum + 1);
  return sum;
}

/// A tensor with history above it, which a region that keeps it as an input does not keep alive.
Tensor with_history(const Tensor& x) { return x * 2; }

template <class Container>
void require_inputs() {
  const Seed seed;
  const Tensor a = leaf({3}), b = leaf({3}), c = leaf({3});
  const auto function = [](Container all) { return sum_of_sines(all); };
  const auto gradients = [&](auto&& call) {
    return grad_of(call(Container{with_history(a), with_history(b), with_history(c)}), {a, b, c});
  };
  const Counted done;
  const auto checkpointed = gradients([&](Container all) { return checkpoint(function, all); });
  CHECK(done.now().recomputes == 1);
  require_bit_equal(checkpointed, gradients(function));

  // Each is an input: below another region none of them is kept.
  const auto held_by = [&](auto&& call) {
    const LiveBytes bytes;
    const Tensor y = call(leaf({1000}));
    return bytes.held();
  };
  const auto inner = [](Container all) { return all.front().sin().exp().sum(); };
  const int64_t held = held_by([&](const Tensor& x) {
    return checkpoint([&](const Tensor& t) { return checkpoint(inner, Container{t.cos()}); }, x);
  });
  CHECK(held <= 4000 + 4);  // x, the result

  // Changed after the call, an input is what the error names.
  Tensor changed = at::ones({3});
  const Tensor y =
      checkpoint([](const Tensor& x, Container all) { return x.sin() * sum_of_sines(all); }, a,
                 Container{changed});
  changed.add_(1);
  CHECK(error_of<remat::CheckpointError>([&] { y.sum().backward(); }).kind() ==
        remat::CheckpointError::Kind::InputChanged);
}

/// The order is by identity, as sets of tensors are made.
struct ByAddress {
  bool operator()(const Tensor& x, const Tensor& y) const {
    return std::less<>()(x.unsafeGetTensorImpl(), y.unsafeGetTensorImpl());
  }
  std::size_t operator()(const Tensor& x) const {
    return std::hash<const void*>()(x.unsafeGetTensorImpl());
  }
};
struct SameTensor {
  bool operator()(const Tensor& x, const Tensor& y) const { return x.is_same(y); }
};

template <class Set>
void require_set() {
  const Seed seed;
  const Tensor leaves[] = {leaf({3}), leaf({3}), leaf({3}), leaf({3}), leaf({3})};
  const Tensors inputs(std::begin(leaves), std::end(leaves));
  const Set all(inputs.begin(), inputs.end());
  Set made;
  for (const Tensor& each : inputs) made.insert(with_history(each));
  for (const Set& given : {all, made}) {
    // Which element is found, and in which order they come, decides what is computed.
    const Tensor known = *given.begin();
    Calls calls;
    const auto function = counted(calls, [&](const Set& set) {
      Tensor sum = sum_of_sines(set);
      return set.count(known) == 1 ? sum.sin() * 2 : sum.cos();
    });
    const auto expected = grad_of(function(given), inputs, {.retain_graph = true});
    calls.reset();
    require_bit_equal(grad_of(checkpoint(function, given), inputs, {.retain_graph = true}),
                      expected);
    CHECK(calls.count() == 2);
    const auto outer = [&](const Set& set) { return checkpoint(function, set).exp(); };
    const auto twice = grad_of(checkpoint(outer, given), inputs, {.retain_graph = true});
    require_bit_equal(twice, grad_of(function(given).exp(), inputs, {.retain_graph = true}));
  }
}

rnn::PackedSequence packed(const Tensor& x) {
  return rnn::pack_padded_sequence(x, torch::tensor({2, 4, 3}), /*batch_first=*/true,
                                   /*enforce_sorted=*/false);
}

}  // namespace

TEST_CASE("the tensors in lists and deques are inputs", "[checkpoint][rule-2]") {
  require_inputs<std::deque<Tensor>>();
  require_inputs<std::list<Tensor>>();
  require_inputs<std::forward_list<Tensor>>();
}

TEST_CASE("containers of containers, and multimaps, are walked", "[checkpoint][rule-2]") {
  const Seed seed;
  const Tensor a = leaf({3}), b = leaf({3}), c = leaf({3});
  const auto require_same = [&](auto function, auto make) {
    const Counted done;
    const auto checkpointed = grad_of(checkpoint(function, make()), {a, b, c});
    CHECK(done.now().recomputes == 1);
    require_bit_equal(checkpointed, grad_of(function(make()), {a, b, c}));
  };
  using Lists = std::list<std::deque<std::optional<Tensor>>>;
  require_same(
      [](const Lists& lists) {
        Tensor sum = at::ones({3});
        for (const auto& list : lists)
          for (const auto& each : list)
            if (each) sum = sum.sin() + each->exp();
        return sum;
      },
      [&] { return Lists{{with_history(a), std::nullopt}, {}, {with_history(b), c}}; });
  const auto mapped = [](const auto& map) {
    Tensor sum = at::ones({3});
    for (int key : {2, 1})
      for (auto [at, end] = map.equal_range(key); at != end; ++at) sum = sum.sin() * at->second;
    return sum;
  };
  using Map = std::multimap<int, Tensor>;
  require_same([&](const Map& map) { return mapped(map); },
               [&] { return Map{{1, with_history(a)}, {2, b}, {1, with_history(c)}}; });
  using HashMap = std::unordered_multimap<int, Tensor>;
  require_same([&](const HashMap& map) { return mapped(map).sum(); },
               [&] { return HashMap{{1, with_history(a)}, {2, b}, {3, c}, {1, c.exp()}}; });
}

TEST_CASE("a set of tensors comes to a recompute in forward's order, with what it finds",
          "[checkpoint][rule-2]") {
  require_set<std::set<Tensor, ByAddress>>();
  require_set<std::multiset<Tensor, ByAddress>>();
  require_set<std::unordered_set<Tensor, ByAddress, SameTensor>>();
}

TEST_CASE("an element of a set that changes after the call is an error in backward",
          "[checkpoint][rule-2]") {
  const Tensor x = leaf({3});
  Tensor changed = at::ones({3});
  const std::set<Tensor, ByAddress> set{changed};
  const Tensor y =
      checkpoint([](const Tensor& t, const auto& all) { return t.sin() * *all.begin(); }, x, set);
  changed.add_(1);
  CHECK_THROWS_AS(y.sum().backward(), c10::Error);
}

TEST_CASE("containers are results", "[checkpoint][rule-2]") {
  const Seed seed;
  const Tensor x = leaf({3});
  const auto require_same = [&]<class Container>(std::type_identity<Container>) {
    const auto function = [](const Tensor& t) {
      const Tensor first = t.sin().exp();
      return Container{first, first.sigmoid(), first * t};
    };
    const auto loss = [](const Container& all) {  // in an order that no address decides
      Tensor product = at::ones({3});
      for (const Tensor& each : all) product = product * each;
      return product;
    };
    const Counted done;
    const Tensor gradient = grad_of(loss(checkpoint(function, x)), {x})[0];
    CHECK(done.now().recomputes == 1);
    CHECK(at::allclose(gradient, grad_of(loss(function(x)), {x})[0]));
  };
  require_same(std::type_identity<std::deque<Tensor>>());
  require_same(std::type_identity<std::list<Tensor>>());
  require_same(std::type_identity<std::set<Tensor, ByAddress>>());
  require_same(std::type_identity<std::unordered_set<Tensor, ByAddress, SameTensor>>());
}

TEST_CASE("a packed sequence is an input and a result, and its tensors are inputs",
          "[checkpoint][rule-2]") {
  const Seed seed;
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(5, 6).num_layers(2).batch_first(true));
  const Tensor x = leaf({3, 4, 5});
  const auto run = [&](auto&& call) {
    const Tensor data = with_history(x);
    const auto [output, state] = call(packed(data));
    const auto [padded, lengths] = rnn::pad_packed_sequence(output, true);
    Tensors inputs = lstm->parameters();
    inputs.push_back(x);
    return grad_of(padded.sin().sum() + std::get<0>(state).sum(), inputs);
  };
  const auto forward = [&](const rnn::PackedSequence& given) {
    return lstm->forward_with_packed_input(given);
  };
  const auto plain = run(forward);
  const Counted done;
  require_bit_equal(run([&](const auto& given) { return checkpoint(forward, given); }), plain);
  CHECK(done.now().recomputes == 1);
  require_bit_equal(run([&](const auto& given) {
                      return checkpoint([&](const auto& t) { return checkpoint(forward, t); },
                                        given);
                    }),
                    plain);

  const Tensor outer = leaf({3, 4, 500});
  const LiveBytes bytes;
  const Tensor y = checkpoint(
      [](const Tensor& t) {
        return checkpoint(
            [](const rnn::PackedSequence& given) { return given.data().sin().exp().sum(); },
            packed(t.cos()));
      },
      outer);
  CHECK(bytes.held() <= 4);
  CHECK(bit_equal(grad_of(y, {outer})[0],
                  grad_of(packed(outer.cos()).data().sin().exp().sum(), {outer})[0]));

  // Without the indices of what was not sorted.
  const auto sorted = [](const Tensor& t) {
    return rnn::pack_padded_sequence(t, torch::tensor({4, 3, 2}), true);
  };
  const auto squares = [](const rnn::PackedSequence& given) {
    CHECK_FALSE(given.sorted_indices().defined());
    return given.data().sin().exp();
  };
  CHECK(bit_equal(grad_of(checkpoint(squares, sorted(x)), {x})[0],
                  grad_of(squares(sorted(x)), {x})[0]));

  rnn::PackedSequence changed = packed(at::ones({3, 4, 5}));
  const Tensor z = checkpoint(
      [](const Tensor& t, const rnn::PackedSequence& given) {
        return t.sin().sum() * given.data().sum();
      },
      x, changed);
  Tensor data = changed.data();
  data.add_(1);
  CHECK(error_of<remat::CheckpointError>([&] { z.backward(); }).kind() ==
        remat::CheckpointError::Kind::InputChanged);
}

TEST_CASE("nested tensors are arguments and results", "[checkpoint][rule-2]") {
  const Seed seed;
  const Tensor a = leaf({2, 4}), b = leaf({3, 4}), weight = leaf({4, 4});
  const auto make = [&] {
    return at::_nested_tensor_from_tensor_list({a.detach(), b.detach()}).requires_grad_();
  };
  const auto function = [&](const Tensor& nested) { return at::gelu(at::linear(nested, weight)); };
  const auto run = [&](auto&& call) {
    const Tensor nested = make();
    const Tensor y = call(nested);
    CHECK(y.is_nested());
    Tensor loss = at::zeros({});
    for (const Tensor& each : y.unbind()) loss = loss + each.sin().sum();
    const auto gradients = grad_of(loss, {nested, weight});
    Tensors all{gradients[1]};
    for (const Tensor& each : gradients[0].unbind()) all.push_back(each);
    return all;
  };
  const auto plain = run(function);
  const Counted done;
  for (const auto level : {remat::DeterminismCheck::Metadata, remat::DeterminismCheck::Values}) {
    const remat::CheckpointOptions options{.determinism_check = level};
    require_bit_equal(run([&](const Tensor& t) { return checkpoint(options, function, t); }),
                      plain);
    require_bit_equal(run([&](const Tensor& t) {
                        return checkpoint(
                            options,
                            [&](const Tensor& u) { return checkpoint(options, function, u); }, t);
                      }),
                      plain);
  }
  CHECK(done.now().recomputes == 2 * (1 + 2));
}
