// Names in errors: regions, the place of their options, parameters and buffers, operators.
// Whole texts.

#include "remat/apply.h"
#include "tests/support/nn.h"

using remat::checkpoint;
using remat::Checkpointed;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::ModuleOptions;
using Kind = remat::CheckpointError::Kind;
namespace nn = torch::nn;

namespace error_names {

struct UNetBlockImpl : nn::Module {
  Tensor forward(const Tensor& x) { return (conv1(x) * scale).sin(); }
  nn::Conv2d conv1 = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(3, 3, 1).bias(false)));
  Tensor scale = register_buffer("scale", at::ones({3, 1, 1}));
};
TORCH_MODULE(UNetBlock);

}  // namespace error_names

using error_names::UNetBlock;
using error_names::UNetBlockImpl;

namespace {

struct NoNamespaceImpl : nn::Module {
  Tensor forward(const Tensor& x) { return x.sin().mul(weight); }
  Tensor weight = register_parameter("weight", at::ones({4}));
};

const Tensor image = leaf({2, 3, 4, 4});

void change(Tensor tensor) {
  const at::NoGradGuard no_grad;
  tensor.add_(1);
}

/// The text of a backward that fails, with `frame #` in the place of the frame's number.
std::string text_of_backward(const Tensor& y) {
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  std::string text = text_of(error);
  const std::string number = "(frame " + std::to_string(error.frame_id());
  for (std::size_t at = 0; (at = text.find(number, at)) != text.npos; ++at)
    text.replace(at, number.size(), "(frame #");
  return text;
}

const std::string changed =
    "remat::checkpoint: A parameter, buffer or captured tensor changed between the forward and "
    "the recompute, so the gradient would be wrong. In ";
const std::string cause_of_change =
    "Cause: it was changed in place, given other storage, or replaced. An optimizer step between "
    "forward and backward does this. A tensor without grad that the function creates and stores "
    "in an outside variable counts as captured, too.\n"
    "Hint: call backward before the change, pass the tensor as an argument, or set capture_check "
    "= CaptureCheck::Ignore to recompute with the new value.\n";
const std::string changed_weight =
    "parameter 'conv1.weight' of UNetBlock (saved tensor at position 1):\n"
    "  forward:   Float[3, 3, 1, 1] on cpu, version 1, saved by ConvolutionBackward0\n"
    "  recompute: Float[3, 3, 1, 1] on cpu, version 2\n";

}  // namespace

TEST_CASE(
    "an error names the parameter that changed, the region by its module's type, and the operator",
    "[error][names]") {
  UNetBlock block;
  const int form = GENERATE(0, 1, 2, 3, 4);
  const Tensor y = form == 0   ? checkpoint(block, image)
                   : form == 1 ? checkpoint(block.ptr(), image)
                   : form == 2 ? checkpoint(block.get(), image)
                   : form == 3 ? checkpoint(nn::AnyModule(block), image)
                               : checkpoint(&UNetBlockImpl::forward, block.get(), image);
  change(block->conv1->weight);
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK(error.kind() == Kind::CaptureChanged);
  CHECK(error.region() == "UNetBlock");
  REQUIRE(error.mismatches().size() == 1);
  CHECK(error.mismatches()[0].forward_tensor == "parameter 'conv1.weight' of UNetBlock");
  CHECK(error.mismatches()[0].recompute_tensor == "parameter 'conv1.weight' of UNetBlock");
  CHECK(error.mismatches()[0].forward_op == "ConvolutionBackward0");
  CHECK(error.mismatches()[0].recompute_op.empty());
}

TEST_CASE("the whole text of a changed parameter", "[error][names]") {
  SECTION("of the function's module") {
    UNetBlock block;
    const Tensor y = checkpoint(block, image);
    change(block->conv1->weight);
    CHECK(text_of_backward(y) ==
          changed + "region \"UNetBlock\" (frame #).\n" + changed_weight + cause_of_change);
  }
  SECTION("of a module that the options name, at their place") {
    UNetBlock block;
    const auto line = std::to_string(__LINE__ + 1);
    const Tensor y = checkpoint(
        {.name = "block 3", .modules = {block.ptr()}},
        [block](const Tensor& x) mutable { return block(x); }, image);
    change(block->conv1->weight);
    CHECK(text_of_backward(y) ==
          changed + "region \"block 3\" (frame #, options at error_names.cpp:" + line + ").\n" +
              changed_weight + cause_of_change);
  }
  SECTION("of no module that is known: how to see it") {
    UNetBlock block;
    const Tensor y = checkpoint([block](const Tensor& x) mutable { return block(x); }, image);
    change(block->conv1->weight);
    CHECK(text_of_backward(y) ==
          changed +
              "region (frame #).\n"
              "saved tensor at position 1:\n"
              "  forward:   Float[3, 3, 1, 1] on cpu, version 1, saved by ConvolutionBackward0\n"
              "  recompute: Float[3, 3, 1, 1] on cpu, version 2\n" +
              cause_of_change +
              "To see which parameter or buffer it is, pass the module as the function, or name it "
              "in CheckpointOptions::modules.\n");
  }
  SECTION("of a Checkpointed") {
    Checkpointed<UNetBlockImpl> block;
    const Tensor y = block(image);
    change(block->conv1->weight);
    CHECK(text_of_backward(y) ==
          changed + "region \"UNetBlock\" (frame #).\n" + changed_weight + cause_of_change);
  }
  SECTION("of a module around the region") {
    struct Net : nn::Module {
      Tensor forward(const Tensor& x) {
        auto inner = [this](const Tensor& t) { return block(t); };
        return checkpoint({.location = {}}, inner, x);
      }
      UNetBlock block = register_module("block", UNetBlock());
    };
    Checkpointed<Net> net;
    const Tensor y = net(image);
    change(net->block->conv1->weight);
    CHECK_THAT(text_of_backward(y),
               contains("In region (frame #).\nparameter 'block.conv1.weight' of Net (saved"));
  }
}

TEST_CASE("a parameter that was given other data has its name", "[error][names]") {
  UNetBlock block;
  const Tensor y = checkpoint(block, image);
  block->conv1->weight.set_data(at::ones({3, 3, 1, 1}));
  CHECK_THAT(text_of_backward(y),
             contains("parameter 'conv1.weight' of UNetBlock (saved tensor at position 1):\n") &&
                 contains(", other storage\n"));
}

TEST_CASE("a view of a parameter has its name", "[error][names]") {
  nn::Linear linear(nn::LinearOptions(4, 4).bias(false));
  const Tensor x = leaf({2, 4});
  const Tensor y = checkpoint(linear, x);
  change(linear->weight);
  CHECK_THAT(text_of_backward(y), contains("In region \"Linear\" (frame #).\nparameter 'weight' of "
                                           "Linear (saved tensor at position "));
}

TEST_CASE("memory that several parameters share has no name of its own", "[error][names]") {
  struct Flat : nn::Module {
    Tensor memory = at::ones({8});
    Tensor first = register_buffer("first", memory.narrow(0, 0, 4));
    Tensor second = register_buffer("second", memory.narrow(0, 4, 4));
    Tensor forward(const Tensor& x) { return x * memory.narrow(0, 2, 4); }
  };
  const auto flat = std::make_shared<Flat>();
  const Tensor y = checkpoint({.buffers = remat::BufferPolicy::Ignore}, flat, leaf({4}));
  change(flat->memory);
  CHECK_THAT(text_of_backward(y), contains(").\nsaved tensor at position 0:\n"));
}

TEST_CASE("where the passes saved other tensors each line has its own name", "[error][names]") {
  struct Pair : nn::Module {
    Tensor wide = register_parameter("wide", at::ones({2, 4}));
    Tensor narrow = register_parameter("narrow", at::ones({4}));
    bool is_first = true;
    Tensor forward(const Tensor& x) { return x * (std::exchange(is_first, false) ? wide : narrow); }
  };
  const auto pair = std::make_shared<Pair>();
  const Tensor y = checkpoint(pair, leaf({2, 4}));
  CHECK_THAT(
      text_of_backward(y),
      contains("In region \"Pair\" (frame #).\n"
               "saved tensor at position 0:\n"
               "  forward:   Float[2, 4] on cpu, parameter 'wide' of Pair, saved by MulBackward0\n"
               "  recompute: Float[4] on cpu, parameter 'narrow' of Pair\n"));
}

TEST_CASE("contents that differ have the names of parameters", "[error][names]") {
  UNetBlock block;
  const Tensor y = checkpoint({.determinism_check = remat::DeterminismCheck::Values}, block, image);
  block->conv1->weight.data().add_(1);
  CHECK_THAT(text_of_backward(y),
             contains("parameter 'conv1.weight' of UNetBlock (saved tensor at position 1):\n"
                      "  forward:   hash ") &&
                 contains(", saved by ConvolutionBackward0\n"));
}

TEST_CASE("a buffer that changes after forward is named, with what saved it", "[error][names]") {
  UNetBlock block;
  const Tensor y = checkpoint(block, image);
  change(block->scale);
  CHECK_THAT(
      text_of_backward(y),
      contains("A parameter, buffer or captured tensor changed between the forward and the "
               "recompute, so the gradient would be wrong. In region \"UNetBlock\" (frame #).\n"
               "buffer 'scale' of UNetBlock (saved tensor at position ") &&
          contains(" on cpu, version 1, saved by MulBackward0\n"));
}

TEST_CASE("an argument that is a buffer of a known module has its name", "[error][names]") {
  UNetBlock block;
  const Tensor y = checkpoint(
      {.modules = {block.ptr()}, .location = {}},
      [](const Tensor& x, const Tensor& w) { return x * w; }, image, block->scale);
  change(block->scale);
  CHECK_THAT(
      text_of_backward(y),
      contains("tensor 1 of the arguments of region (frame #), counted from 0, buffer 'scale' "
               "of UNetBlock, is at version 2; expected version 1 instead.\n"));
}

TEST_CASE("calls of a group that overlap name the tensor and what saved it", "[error][names]") {
  UNetBlock block;
  const Tensor y = checkpoint(block, image);
  const remat::GraphExecGroup group;
  grad_of(y, {image}, {.retain_graph = true});
  CHECK_THAT(text_of_backward(y),
             contains("In region \"UNetBlock\" (frame #), saved tensor at position ") &&
                 contains(", saved by SinBackward0.\nCause: "));
}

TEST_CASE("a kept result that was changed is told in the words that people look up",
          "[error][names][rule-15]") {
  Tensor kept;
  const Tensor y = checkpoint(
      {.name = "keeping", .policy = remat::save_ops({"aten::exp"}), .location = {}},
      [&](const Tensor& x) {
        kept = x.exp();
        return kept.sin();
      },
      image);
  change(kept);
  CHECK(text_of_backward(y) ==
        "remat: Tensor cached during selective activation checkpoint has been mutated. In region "
        "\"keeping\" (frame #): the result of aten::exp.default, call 0, was kept and then changed "
        "in place.\n"
        "Cause: an in-place operator, in the region or after it, wrote to the kept tensor.\n"
        "Hint: keep another result, use the out-of-place operator, or set "
        "SelectiveOptions::allow_cache_entry_mutation, which runs such a call again.\n"
        "Operators (2 in forward, 1 so far in the recompute):\n"
        "         forward                                  recompute\n"
        "      0> aten::exp.default                        aten::exp.default\n"
        "      1  aten::sin.default                        \n");
}

TEST_CASE("a pinned parameter that was changed has its name", "[error][names][rule-15]") {
  const auto module = std::make_shared<NoNamespaceImpl>();
  const Tensor y = checkpoint(
      {.modules = {module}, .location = {}},
      [module](const Tensor& x) { return (x * remat::pin(module->weight)).exp(); }, leaf({4}));
  change(module->weight);
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK_THAT(text_of(error), contains("parameter 'weight' of NoNamespace"));
}

TEST_CASE("regions without a name are called by their module's type", "[names]") {
  const Tensor x = leaf({2, 4});
  std::vector<std::string> seen;
  struct Named : nn::Module {
    Tensor forward(const Tensor& x) {
      names->push_back(remat::current_phase().name);
      return x.sin();
    }
    std::vector<std::string>* names = nullptr;
  };
  const auto named = std::make_shared<Named>();
  named->names = &seen;
  checkpoint(named, x).sum().backward();
  checkpoint({.name = "given"}, named, x);
  checkpoint([named](const Tensor& t) { return named->forward(t); }, x);
  CHECK(seen == std::vector<std::string>{"Named", "Named", "given", ""});

  const remat::Recorder recorder;
  nn::Sequential chain{nn::Linear(4, 4), nn::Tanh(), nn::Linear(4, 4), nn::Tanh()};
  Checkpointed<nn::LinearImpl> layer(4, 4);
  struct Local : nn::Module {
    Tensor forward(const Tensor& t) { return t.sin(); }
  };
  Local on_stack;
  struct Impl : Local {};
  checkpoint(std::make_shared<Impl>(), x);
  checkpoint(chain, x);
  layer(x);
  checkpoint(layer, x);
  checkpoint(&on_stack, x);
  checkpoint(std::make_shared<NoNamespaceImpl>(), x);
  remat::checkpoint_sequential(chain, 2, x, {.checkpoint_last = true});
  remat::checkpoint_sequential(chain, 4, x, {.checkpoint = {.name = "chain"}});
  std::vector<std::string> names;
  for (const auto& region : recorder.report().regions) names.push_back(region.name);
  CHECK(names == std::vector<std::string>{"Impl", "Sequential", "Linear", "Local", "NoNamespace",
                                          "stages 0 to 1", "stages 2 to 3", "chain 0", "chain 1",
                                          "chain 2"});
}

TEST_CASE("modules that are switched from outside are regions by the name of their path",
          "[names]") {
  const Tensor x = leaf({2, 4});
  nn::Sequential chain{
      nn::Linear(4, 4), Checkpointed<nn::LinearImpl>(4, 4),
      Checkpointed<nn::LinearImpl>(ModuleOptions{.checkpoint = {.name = "own"}}, 4, 4)};
  const auto done = remat::apply_checkpointing(*chain, {.type = "*Linear*"});
  CHECK(done.regions.size() == 3);
  const remat::Recorder recorder;
  chain->forward(x);
  std::vector<std::string> names;
  for (const auto& region : recorder.report().regions) names.push_back(region.name);
  CHECK(names == std::vector<std::string>{"0", "1", "own"});
}

TEST_CASE("an error says where the options of its region were written", "[error][names]") {
  const auto place_in = [](const Tensor& y, const Tensor& w) {
    change(w);
    const std::string text = text_of_backward(y);
    const std::size_t begin = text.find("(frame #");
    return text.substr(begin, text.find(')', begin) + 1 - begin);
  };
  const auto here = [](int line) {
    return "(frame #, options at error_names.cpp:" + std::to_string(line) + ")";
  };
  const Tensor x = leaf({2}), w = leaf({2});
  const auto f = [w](const Tensor& t) { return t * w; };
  // clang-format off
  CHECK(place_in(checkpoint({.name = "at the call"}, f, x), w) == here(__LINE__));
  CHECK(place_in(checkpoint(CheckpointOptions{.early_stop = false}, f, x), w) == here(__LINE__));
  CHECK(place_in(remat::checkpointed(f, {.name = "a callable"})(x), w) == here(__LINE__));
  const CheckpointOptions shared{.name = "used twice"}; const int line_of_shared = __LINE__;
  // clang-format on
  CHECK(place_in(checkpoint(shared, f, x), w) == here(line_of_shared));
  const CheckpointOptions copy = shared;
  CHECK(place_in(checkpoint(copy, f, x), w) == here(line_of_shared));

  CHECK(place_in(checkpoint(f, x), w) == "(frame #)");
  CheckpointOptions member_by_member;
  member_by_member.early_stop = false;
  CHECK(place_in(checkpoint(member_by_member, f, x), w) == "(frame #)");
  CHECK(place_in(checkpoint({.location = {}}, f, x), w) == "(frame #)");
  CHECK(place_in(checkpoint({.location = {"a/train.cpp", 42}}, f, x), w) ==
        "(frame #, options at train.cpp:42)");
  CHECK(place_in(checkpoint({.location = {"train.cpp", 1'000'000}}, f, x), w) ==
        "(frame #, options at train.cpp:1000000)");
  CHECK(ModuleOptions{}.checkpoint.location.file == nullptr);
  CHECK(ModuleOptions{.level = 2}.checkpoint.location.file == nullptr);
  CHECK(remat::SequentialOptions{.checkpoint_last = true}.checkpoint.location.file == nullptr);
  CHECK(ModuleOptions{.checkpoint = {.name = "x"}}.checkpoint.location.line == __LINE__);
}

TEST_CASE("in a mismatch both lines name the operator, without debug", "[error][names]") {
  struct Branch : nn::Module {
    Tensor weight = register_parameter("weight", at::ones({4}));
    bool is_first = true;
    Tensor forward(const Tensor& x) {
      const Tensor y = std::exchange(is_first, false) ? (x * weight).view({2, 2}).sin()
                                                      : x.view({2, 2}).exp().cos();
      return y.sigmoid();
    }
  };
  const auto branch = std::make_shared<Branch>();
  const Tensor y = checkpoint(branch, leaf({4}));
  const std::string text = text_of_backward(y);
  CHECK_THAT(text, contains("saved tensor at position 0:\n"
                            "  forward:   Float[4] on cpu, parameter 'weight' of Branch, saved by "
                            "MulBackward0\n"
                            "  recompute: Float[2, 2] on cpu, saved by ExpBackward0\n"));
  CHECK_THAT(text, contains("To see the operators of both passes"));
}

TEST_CASE("the operator of the only tensor that differs is named, too", "[error][names]") {
  bool is_first = true;
  const Tensor y = checkpoint(
      [&](const Tensor& x) {
        return (std::exchange(is_first, false) ? x.sin() : x.view({2, 2}).sin().view({4}))
            .sigmoid();
      },
      leaf({4}));
  CHECK_THAT(text_of_backward(y),
             contains("  recompute: Float[2, 2] on cpu, saved by SinBackward0\n"));
}

TEST_CASE("where the numbers differ the first tensor that only one pass saved is named",
          "[error][names]") {
  struct Counts : nn::Module {
    Tensor weight = register_parameter("weight", at::ones({4}));
    int64_t calls = 0, more_from = 0;
    Tensor forward(const Tensor& x) {
      const Tensor y = x.sin();
      return (++calls == 1) == (more_from == 0) ? y * weight : y;
    }
  };
  const auto counts = std::make_shared<Counts>();
  SECTION("fewer") {
    const Tensor y = checkpoint(counts, leaf({4}));
    CHECK_THAT(text_of_backward(y),
               contains("tensors\nsaved tensor at position 1:\n"
                        "  forward:   Float[4] on cpu, parameter 'weight' of Counts, saved by "
                        "MulBackward0\n"
                        "  recompute: (none)\n"));
  }
  SECTION("more") {
    counts->more_from = 2;
    const Tensor y = checkpoint({.early_stop = false}, counts, leaf({4}));
    CHECK_THAT(text_of_backward(y),
               contains("when it was noticed\nsaved tensor at position 1:\n"
                        "  forward:   (none)\n"
                        "  recompute: Float[4] on cpu, parameter 'weight' of Counts\n"));
  }
}
