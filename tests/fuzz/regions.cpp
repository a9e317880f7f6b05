// Calls a region with its arguments and results in containers, structs and other types.

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <array>
#include <map>
#include <tuple>
#include <unordered_map>
#include <variant>

#include "tests/fuzz/run.h"

namespace fuzz {

namespace {

/// A struct that takes part by ADL.
struct Bundle {
  Tensor first;
  int number = 0;
  Tensors rest;
};

template <class Visitor>
void visit_tensors(Bundle& bundle, Visitor&& visit) {
  visit(bundle.first);
  for (Tensor& tensor : bundle.rest) visit(tensor);
}

using Options = remat::CheckpointOptions;

template <class Fn, class... Args>
auto call(bool checkpointed_form, const Options& options, Fn fn, Args&&... args) {
  if (checkpointed_form)
    return remat::checkpointed(std::move(fn), options)(std::forward<Args>(args)...);
  return remat::checkpoint(options, std::move(fn), std::forward<Args>(args)...);
}

Tensors tail(const Tensors& all, size_t from) {
  if (all.size() <= from) return {};
  return Tensors(all.begin() + static_cast<std::ptrdiff_t>(from), all.end());
}

Tensors appended(Tensors first, const Tensors& rest) {
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
}

template <class Map>
Tensors values_of(const Map& map) {
  Tensors all;
  for (int i = 0; i < static_cast<int>(map.size()); ++i) all.push_back(map.at(i));
  return all;
}

template <class Map>
Map map_of(const Tensors& all) {
  Map map;
  for (int i = 0; i < static_cast<int>(all.size()); ++i) map.emplace(i, all[i]);
  return map;
}

Bundle bundle_of(const Tensors& all) { return {all.at(0), 7, tail(all, 1)}; }

Tensors call_separate(bool form, const Options& options, const Body& body, const Tensors& args) {
  if (args.size() == 1) {
    return {call(form, options, [body](const Tensor& a) { return body({a}).at(0); }, args[0])};
  }
  if (args.size() == 2) {
    auto [first, rest] = call(
        form, options,
        [body](Tensor a, const Tensor& b) {
          Tensors out = body({std::move(a), b});
          return std::make_pair(out.at(0), tail(out, 1));
        },
        args[0], args[1]);
    return appended({first}, rest);
  }
  return call(
      form, options,
      [body](Tensor a, int, Tensor&& b, Tensors rest) {
        return body(appended({std::move(a), std::move(b)}, rest));
      },
      args[0], 3, args[1], tail(args, 2));
}

}  // namespace

Tensors call_region(Packing packing, bool form, const Options& options, const Body& body,
                    const Tensors& args) {
  switch (packing) {
    case Packing::Separate: {
      Tensors out = call_separate(form, options, body, args);
      return out;
    }
    case Packing::Map: {
      using Map = std::map<int, Tensor>;
      return values_of(call(
          form, options, [body](const Map& map) { return map_of<Map>(body(values_of(map))); },
          map_of<Map>(args)));
    }
    case Packing::UnorderedMap: {
      using Map = std::unordered_map<int, Tensor>;
      return values_of(call(
          form, options, [body](const Map& map) { return map_of<Map>(body(values_of(map))); },
          map_of<Map>(args)));
    }
    case Packing::OptionalAndTuple: {
      using Tuple = std::tuple<std::string, Tensors>;
      auto [first, rest] = call(
          form, options,
          [body](std::optional<Tensor> a, std::optional<Tensor> nothing, Tuple b) {
            TORCH_CHECK(a && !nothing);
            Tensors out = body(appended({*a}, std::get<1>(b)));
            return std::make_tuple(std::optional<Tensor>(out.at(0)), tail(out, 1));
          },
          std::optional<Tensor>(args.at(0)), std::optional<Tensor>(), Tuple("name", tail(args, 1)));
      return appended({*first}, rest);
    }
    case Packing::Struct: {
      Bundle out = call(
          form, options,
          [body](Bundle bundle) { return bundle_of(body(appended({bundle.first}, bundle.rest))); },
          bundle_of(args));
      return appended({out.first}, out.rest);
    }
    case Packing::List: {
      using Dict = c10::Dict<std::string, Tensor>;
      Dict dict;
      dict.insert("a", args.at(0));
      c10::List<Tensor> list(tail(args, 1));
      return call(
          form, options,
          [body](const c10::List<Tensor>& rest, const Dict& first) {
            return body(appended({first.at("a")}, rest.vec()));
          },
          list, dict);
    }
    case Packing::Variant: {
      using Either = std::variant<int, Tensor, Tensors>;
      return call(
          form, options,
          [body](std::array<Either, 2> both) {
            Tensors all = {std::get<Tensor>(both[0])};
            if (both[1].index() == 2) all = appended(all, std::get<Tensors>(both[1]));
            return body(all);
          },
          std::array<Either, 2>{args.at(0), args.size() > 1 ? Either(tail(args, 1)) : Either(1)});
    }
    case Packing::VectorWithUndefined: {
      return call(
          form, options,
          [body](const Tensors& all, const Tensor& undefined) {
            TORCH_CHECK(!undefined.defined() && !all.back().defined());
            return body(Tensors(all.begin(), all.end() - 1));
          },
          appended(args, {Tensor()}), Tensor());
    }
    default:
      return call(form, options, [body](Tensors all) { return body(std::move(all)); }, args);
  }
}

}  // namespace fuzz
