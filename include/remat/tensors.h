#pragma once
// Finds every tensor inside a value: containers, LibTorch's handles, and user structs by ADL.

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <deque>
#include <forward_list>
#include <list>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace c10 {
template <class T>
class List;
template <class Key, class Value>
class Dict;
}  // namespace c10
namespace torch {
template <typename Key, typename Value>
class OrderedDict;
namespace nn::utils::rnn {
class PackedSequence;
}
}  // namespace torch

namespace remat::detail {

/// A stand-in for any visitor, to test whether a type has `visit_tensors`.
struct VisitorProbe {
  void operator()(at::Tensor&) const {}
};

template <class T>
concept HasVisitTensors = requires(T& value, VisitorProbe probe) { visit_tensors(value, probe); };

/// Walks the tensors of a T. `any`: a T may hold tensors. `ordered`: a copy is walked in the same
/// order. `shared`: a copy shares its tensors with the original until `own` is called.
template <class T>
struct Tensors {
  static constexpr bool any = HasVisitTensors<T>;
  static constexpr bool ordered = !any;
  static constexpr bool shared = false;
  template <class Visit>
  static void visit(T& value, Visit& visitor) {
    if constexpr (any) visit_tensors(value, visitor);
  }
  static void own(T&) {}
};

template <class T>
  requires std::derived_from<T, at::Tensor>
struct Tensors<T> {
  static constexpr bool any = true, ordered = true, shared = false;
  template <class Visit>
  static void visit(T& value, Visit& visitor) {
    visitor(static_cast<at::Tensor&>(value));
  }
  static void own(T&) {}
};

/// Walks a range of elements of one type.
template <class T>
struct TensorsOfElements {
  using Inner = Tensors<std::remove_cv_t<T>>;
  static constexpr bool any = Inner::any, ordered = Inner::ordered, shared = Inner::shared;
  template <class Range, class Visit>
  static void visit(Range& range, Visit& visitor) {
    if constexpr (any)
      for (auto& element : range) Inner::visit(element, visitor);
  }
  template <class Range>
  static void own(Range& range) {
    if constexpr (shared)
      for (auto& element : range) Inner::own(element);
  }
};

template <class T, class A>
struct Tensors<std::vector<T, A>> : TensorsOfElements<T> {};
template <class T, std::size_t N>
struct Tensors<std::array<T, N>> : TensorsOfElements<T> {};
template <class T, class A>
struct Tensors<std::deque<T, A>> : TensorsOfElements<T> {};
template <class T, class A>
struct Tensors<std::list<T, A>> : TensorsOfElements<T> {};
template <class T, class A>
struct Tensors<std::forward_list<T, A>> : TensorsOfElements<T> {};

// Note [Sets]
// A set orders or looks up tensors by identity, usually by address. If its tensors were replaced by
// those of a recompute, it would have another order, and lookups would fail. Therefore a set is
// kept unchanged, and its tensors count as captured: its order and its lookups are those of
// forward.

template <class T>
struct Tensors<std::optional<T>> {
  using Inner = Tensors<T>;
  static constexpr bool any = Inner::any, ordered = Inner::ordered, shared = Inner::shared;
  template <class Visit>
  static void visit(std::optional<T>& value, Visit& visitor) {
    if constexpr (any)
      if (value) Inner::visit(*value, visitor);
  }
  static void own(std::optional<T>& value) {
    if constexpr (shared)
      if (value) Inner::own(*value);
  }
};

template <class Tuple, class... Ts>
struct TensorsOfTuple {
  static constexpr bool any = (Tensors<Ts>::any || ...);
  static constexpr bool ordered = (Tensors<Ts>::ordered && ...);
  static constexpr bool shared = (Tensors<Ts>::shared || ...);
  template <class Visit>
  static void visit(Tuple& value, Visit& visitor) {
    if constexpr (any)
      std::apply([&](auto&... e) { (Tensors<Ts>::visit(e, visitor), ...); }, value);
  }
  static void own(Tuple& value) {
    if constexpr (shared) std::apply([](auto&... e) { (Tensors<Ts>::own(e), ...); }, value);
  }
};

template <class... Ts>
struct Tensors<std::tuple<Ts...>> : TensorsOfTuple<std::tuple<Ts...>, Ts...> {};
template <class A, class B>
struct Tensors<std::pair<A, B>> : TensorsOfTuple<std::pair<A, B>, A, B> {};

template <class... Ts>
struct Tensors<std::variant<Ts...>> {
  static constexpr bool any = (Tensors<Ts>::any || ...);
  static constexpr bool ordered = (Tensors<Ts>::ordered && ...);
  static constexpr bool shared = (Tensors<Ts>::shared || ...);
  template <class Visit>
  static void visit(std::variant<Ts...>& value, Visit& visitor) {
    if constexpr (any) std::visit([&]<class T>(T& e) { Tensors<T>::visit(e, visitor); }, value);
  }
  static void own(std::variant<Ts...>& value) {
    if constexpr (shared) std::visit([]<class T>(T& e) { Tensors<T>::own(e); }, value);
  }
};

/// Walks the mapped values of an associative container; keys hold no tensors that could change.
template <class Map, bool keeps_order>
struct TensorsOfMap {
  using Inner = Tensors<typename Map::mapped_type>;
  static constexpr bool any = Inner::any, shared = Inner::shared;
  static constexpr bool ordered = !any || (Inner::ordered && keeps_order);
  template <class Visit>
  static void visit(Map& map, Visit& visitor) {
    if constexpr (any)
      for (auto& [key, value] : map) Inner::visit(value, visitor);
  }
  static void own(Map& map) {
    if constexpr (shared)
      for (auto& [key, value] : map) Inner::own(value);
  }
};

template <class K, class V, class C, class A>
struct Tensors<std::map<K, V, C, A>> : TensorsOfMap<std::map<K, V, C, A>, true> {};
template <class K, class V, class C, class A>
struct Tensors<std::multimap<K, V, C, A>> : TensorsOfMap<std::multimap<K, V, C, A>, true> {};
template <class K, class V, class H, class E, class A>
struct Tensors<std::unordered_map<K, V, H, E, A>>
    : TensorsOfMap<std::unordered_map<K, V, H, E, A>, false> {};
template <class K, class V, class H, class E, class A>
struct Tensors<std::unordered_multimap<K, V, H, E, A>>
    : TensorsOfMap<std::unordered_multimap<K, V, H, E, A>, false> {};

/// Visits a copy of an element behind a proxy and writes it back if a tensor in it was replaced.
template <class V, class Visit, class Write>
void visit_through_proxy(V element, Visit& visitor, Write write) {
  bool replaced = false;
  auto watch = [&](at::Tensor& tensor) {
    const at::Tensor before = tensor;
    visitor(tensor);
    replaced = replaced || !tensor.is_same(before);
  };
  Tensors<V>::visit(element, watch);
  if (replaced) write(std::move(element));
}

template <class T>
struct Tensors<c10::List<T>> {
  using Inner = Tensors<T>;
  static constexpr bool any = Inner::any, ordered = Inner::ordered, shared = Inner::any;
  template <class Visit>
  static void visit(c10::List<T>& list, Visit& visitor) {
    if constexpr (any)
      for (std::size_t i = 0; i < list.size(); ++i)
        visit_through_proxy<T>(list.get(i), visitor, [&](T&& e) { list.set(i, std::move(e)); });
  }
  static void own(c10::List<T>& list) {
    if constexpr (shared) {
      list = list.copy();
      if constexpr (Inner::shared)
        for (std::size_t i = 0; i < list.size(); ++i) {
          T element = list.get(i);
          Inner::own(element);
          list.set(i, std::move(element));
        }
    }
  }
};

template <class K, class V>
struct Tensors<c10::Dict<K, V>> {
  using Inner = Tensors<V>;
  static constexpr bool any = Inner::any, shared = Inner::any;
  static constexpr bool ordered = !any;  // a copy is rehashed and may have another order
  template <class Visit>
  static void visit(c10::Dict<K, V>& dict, Visit& visitor) {
    if constexpr (any)
      for (auto& entry : dict)
        visit_through_proxy<V>(entry.value(), visitor,
                               [&](V&& e) { entry.setValue(std::move(e)); });
  }
  static void own(c10::Dict<K, V>& dict) {
    if constexpr (shared) {
      dict = dict.copy();
      if constexpr (Inner::shared)
        for (auto& entry : dict) {
          V element = entry.value();
          Inner::own(element);
          entry.setValue(std::move(element));
        }
    }
  }
};

template <class K, class V>
struct Tensors<torch::OrderedDict<K, V>> {
  using Inner = Tensors<V>;
  static constexpr bool any = Inner::any, ordered = Inner::ordered, shared = Inner::shared;
  template <class Visit>
  static void visit(torch::OrderedDict<K, V>& dict, Visit& visitor) {
    if constexpr (any)
      for (auto& item : dict) Inner::visit(item.value(), visitor);
  }
  static void own(torch::OrderedDict<K, V>& dict) {
    if constexpr (shared)
      for (auto& item : dict) Inner::own(item.value());
  }
};

// The constructor would compute missing members; the accessors return references to the members.
template <std::same_as<torch::nn::utils::rnn::PackedSequence> T>
struct Tensors<T> {
  static constexpr bool any = true, ordered = true, shared = false;
  template <class Visit>
  static void visit(T& packed, Visit& visitor) {
    visitor(const_cast<at::Tensor&>(packed.data()));
    visitor(const_cast<at::Tensor&>(packed.batch_sizes()));
    visitor(const_cast<at::Tensor&>(packed.sorted_indices()));
    visitor(const_cast<at::Tensor&>(packed.unsorted_indices()));
  }
  static void own(T&) {}
};

}  // namespace remat::detail
