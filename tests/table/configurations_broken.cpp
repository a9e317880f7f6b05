// Configurations that are wrong on purpose, to test the comparison.

#include <ATen/ATen.h>

#include <atomic>
#include <memory>
#include <stdexcept>

#include "remat/checkpoint.h"
#include "tests/table/table.h"

namespace table {

const std::vector<Configuration>& broken_configurations() {
  // Each produces, in its own way, a fault that no program detects by itself.
  static const std::vector<Configuration> all{
      {"other_numbers",
       [](const Body& body, const Tensors& args) {
         at::rand({1});
         return plain_region(body, args);
       }},
      {"other_gradient",
       [](const Body& body, const Tensors& args) {
         Tensors results = plain_region(body, args);
         for (Tensor& t : results)
           if (t.requires_grad()) t.register_hook([](const Tensor& g) { return g * 1.0000002; });
         return results;
       }},
      {"other_gradient_later",
       [](const Body& body, const Tensors& args) {
         Tensors results = plain_region(body, args);
         const auto calls = std::make_shared<std::atomic<int>>(0);
         for (Tensor& t : results)
           if (t.requires_grad())
             t.register_hook([calls](const Tensor& g) { return ++*calls > 1 ? g * 2 : g; });
         return results;
       }},
      {"other_recompute",
       [](const Body& body, const Tensors& args) {
         const auto calls = std::make_shared<std::atomic<int>>(0);
         return plain_region(
             [body, calls](const Tensors& given) {
               const bool is_first = ++*calls == 1;
               return body(each_float(
                   given, [is_first](const Tensor& t) { return is_first ? t * 1 : t * 1.5; }));
             },
             args);
       }},
      {"no_numbers_kept",
       [](const Body& body, const Tensors& args) {
         return remat::checkpoint({.preserve_rng_state = false}, body, args);
       }},
      {"other_version",
       [](const Body& body, const Tensors& args) {
         for (const Tensor& t : args)
           if (!t.requires_grad()) t.unsafeGetTensorImpl()->bump_version();
         return plain_region(body, args);
       }},
      {"no_region", [](const Body& body, const Tensors& args) { return body(args); }},
      {"leak",
       [](const Body& body, const Tensors& args) {
         static Tensors leaked;
         leaked.push_back(at::ones({1000}));
         return plain_region(body, args);
       }},
      {"frame_alive",
       [](const Body& body, const Tensors& args) {
         static std::vector<Tensors> graphs;
         graphs.push_back(plain_region(body, args));
         return graphs.back();
       }},
      {"silent_error",
       [](const Body& body, const Tensors& args) {
         try {
           return plain_region(body, args);
         } catch (const std::exception&) {
           return Tensors{};
         }
       }},
      {"other_error",
       [](const Body& body, const Tensors& args) {
         try {
           return plain_region(body, args);
         } catch (const std::exception&) {
           throw std::runtime_error("another error");
         }
       }},
  };
  return all;
}

}  // namespace table
