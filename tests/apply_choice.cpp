// Which modules a choice means, what cannot be a region from outside, and regions that are never
// used: with the texts.

#include "remat/apply.h"

#include <algorithm>

#include "tests/support/nn.h"

using remat::apply_checkpointing;
using remat::Checkpointed;
using remat::ModuleChoice;
using remat::ModuleOptions;
using remat::remove_checkpointing;
using remat::require_checkpointing;
using remat::reset_unused_regions;
using remat::unused_regions;
namespace nn = torch::nn;

namespace {

using Paths = std::vector<std::string>;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width = 4) : linear(width, width) {
    register_module("linear", linear);
  }
  Tensor forward(const Tensor& x) { return linear(x).sin().sin(); }
  nn::Linear linear;
};
TORCH_MODULE(Block);

struct WideBlockImpl : BlockImpl {
  WideBlockImpl() : BlockImpl(4) {}
  Tensor forward(const Tensor& x) { return BlockImpl::forward(x); }
};
TORCH_MODULE(WideBlock);

template <class T, class U>
struct JoinedImpl : nn::Module {
  Tensor forward(const Tensor& x) { return x.sin(); }
};

/// All the places a module may have in somebody else's model.
struct ModelImpl : nn::Module {
  ModelImpl() {
    for (int i = 0; i < 4; ++i) layers->push_back(Block());
    layers->push_back(WideBlock());
    list->push_back(Block());
    dict->update({{"left", Block().ptr()}});
    register_module("stem", stem);
    register_module("layers", layers);
    register_module("list", list);
    register_module("dict", dict);
    register_module("head", head);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = layers->forward(stem(x));
    y = list[0]->as<Block>()->forward(y);
    y = dict["left"]->as<Block>()->forward(y);
    return head(y);
  }
  Block stem;
  nn::Sequential layers;
  nn::ModuleList list;
  nn::ModuleDict dict;
  nn::Linear head{4, 4};
};
TORCH_MODULE(Model);

Paths chosen_by(const ModuleChoice& choice) {
  Model model;
  const auto applied = apply_checkpointing(*model, choice);
  Paths paths;
  // In the order of the tree, which that of the two lists together is not: sorted.
  for (const auto& each : applied.regions) paths.push_back(each.path);
  for (const auto& each : applied.refused) paths.push_back(each.path);
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string text_of_error(const std::function<void()>& call) {
  return text_of(error_of<c10::ValueError>(call));
}

const std::string& conditions() {
  static const std::string text =
      "Hint: write conditions as key=value, separated by commas. The keys are name (a pattern of "
      "paths: `*` matches anything except a dot, `**` matches anything, `|` separates "
      "alternatives), type (a pattern of class names, in the same syntax), every (a number of at "
      "least 1) and policy (text for Policy::parse); for example "
      "\"every=2,name=layers.*,type=Bottleneck\".";
  return text;
}

}  // namespace

TEST_CASE("a choice means what fits its path, its type and its function, every n-th of it",
          "[apply]") {
  const Seed seed;
  CHECK(chosen_by({.name = "layers.*"}) ==
        Paths{"layers.0", "layers.1", "layers.2", "layers.3", "layers.4"});
  CHECK(chosen_by({.name = "layer*"}) == Paths{"layers"});
  CHECK(chosen_by({.name = "layers.?"}).size() == 5);
  CHECK(chosen_by({.name = "list?0|head"}) == Paths{"head"});  // no dot by `?`
  CHECK(chosen_by({.name = "layers.0**"}) == Paths{"layers.0", "layers.0.linear"});
  CHECK(chosen_by({.name = "**.linear"}).size() == 8);
  CHECK(chosen_by({.name = "*"}) == Paths{"dict", "head", "layers", "list", "stem"});
  CHECK(chosen_by({.name = "layers.1 | layers.3"}) == Paths{"layers.1", "layers.3"});
  CHECK(chosen_by({.name = "layers.*", .every = 2}) == Paths{"layers.0", "layers.2", "layers.4"});
  CHECK(chosen_by({.name = "layers.*", .every = 9}) == Paths{"layers.0"});

  const Paths blocks{"dict.left", "layers.0", "layers.1", "layers.2", "layers.3", "list.0", "stem"};
  CHECK(chosen_by({.type = "Block"}) == blocks);
  CHECK(chosen_by({.type = "BlockImpl"}) == blocks);
  CHECK(chosen_by({.type = "*Block"}).size() == 8);
  CHECK(chosen_by({.type = "WideBlock|ModuleList"}) == Paths{"layers.4", "list"});
  CHECK(chosen_by({.type = "Linear"}).size() == 9);
  CHECK(chosen_by({.type = "nn::LinearImpl"}).size() == 9);
  CHECK(chosen_by({.type = "torch::nn::Linear"}).size() == 9);
  CHECK(chosen_by({.type = "Model"}) == Paths{""});
  CHECK(chosen_by(remat::choose<Block>()).size() == 8);  // and what derives from it
  CHECK(chosen_by(remat::choose<BlockImpl>({.name = "layers.*", .every = 2})) ==
        Paths{"layers.0", "layers.2", "layers.4"});
  CHECK(chosen_by({.type = "Block", .where = [](const std::string& path, nn::Module& module) {
                     return path.size() == 8 && module.as<Block>() != nullptr && path.back() > '1';
                   }}) == Paths{"layers.2", "layers.3"});
  CHECK(chosen_by(remat::choose<Block>({.where = [](const std::string& path, nn::Module&) {
          return path == "stem" || path == "head";
        }})) == Paths{"stem"});

  CHECK(chosen_by(ModuleChoice::parse("every=2,name=layers.*,type=Block")) ==
        Paths{"layers.0", "layers.2"});
  CHECK(chosen_by(ModuleChoice::parse(" type = WideBlock | Model ")) == Paths{"", "layers.4"});
  nn::Sequential joined(std::make_shared<JoinedImpl<int, float>>());
  CHECK(require_checkpointing(*joined, ModuleChoice::parse("type=JoinedImpl<int, float>,every=1"))
            .size() == 1);
}

TEST_CASE("a choice that is wrong says what was, which keys there are, and an example", "[apply]") {
  const auto parsed = [](const std::string& text) {
    return text_of_error([&] { ModuleChoice::parse(text); });
  };
  const std::string start = "remat::ModuleChoice::parse: ";
  CHECK(parsed("") == start + "the text was empty. " + conditions());
  CHECK(parsed("evry=2,name=a") ==
        start +
            "\"evry=2\" in \"evry=2,name=a\" was not a condition. Cause: there is no key "
            "\"evry\". " +
            conditions());
  CHECK_THAT(parsed("layers.*"), contains("Cause: it has no `=`. Hint: "));
  CHECK_THAT(parsed("name=a,"), contains("\"\" in \"name=a,\" was not a condition"));
  CHECK_THAT(parsed("name="), contains("Cause: its value is empty. Hint: "));
  CHECK_THAT(parsed("name=a,name=b"), contains("Cause: the key name appears twice. Hint: "));
  CHECK_THAT(parsed("name=a||b"), contains("Cause: a pattern beside `|` is empty. Hint: "));
  for (const std::string number : {"0", "-1", "two", "2.5", "99999999999999999999"})
    CHECK_THAT(parsed("every=" + number),
               contains("Cause: \"" + number + "\" is not a number of at least 1. Hint: "));

  const Seed seed;
  nn::Sequential net(Block(4), Block(4));
  CHECK(text_of_error([&] { require_checkpointing(*net, {.name = "layers.*"}); }) ==
        "remat::require_checkpointing: no module of the tree matches \"name=layers.*\". Cause: the "
        "tree has the root (torch::nn::SequentialImpl), 0 (BlockImpl), 0.linear "
        "(torch::nn::LinearImpl), 1 (BlockImpl), 1.linear (torch::nn::LinearImpl). Hint: choose "
        "some of these. In paths, `*` matches anything except a dot: `layers.*` are the children "
        "of layers, `layers.**` all modules below it.");
  Model model;
  CHECK_THAT(
      text_of_error([&] { remove_checkpointing(*model, {.type = "Blok", .every = 3}); }),
      contains(
          "remat::remove_checkpointing: no module of the tree matches \"type=Blok,every=3\"") &&
          contains("and 9 more"));
  nn::Sequential eleven;
  for (int i = 0; i < 11; ++i) eleven->push_back(nn::Tanh());
  CHECK_THAT(text_of_error([&] { require_checkpointing(*eleven, {.name = "layers.*"}); }),
             contains("10 (torch::nn::TanhImpl). Hint: "));  // twelve with the root: all are named
  CHECK_THAT(text_of_error([&] { static_cast<void>(apply_checkpointing(*model, {.every = 2})); }),
             contains("remat::apply_checkpointing: the choice had no condition."));
  CHECK_THAT(text_of_error([&] { require_checkpointing(*model, {.name = "*", .every = 0}); }),
             contains("ModuleChoice::every was 0"));
  CHECK_THAT(text_of_error([&] { require_checkpointing(*model, {.name = "|stem"}); }),
             contains("a pattern in \"|stem\" was empty"));
}

TEST_CASE("what cannot be a region from outside is named, with the reason and what to write",
          "[apply]") {
  const Seed seed;
  Model model;
  const auto applied = apply_checkpointing(
      *model, {.name = "layers|list|dict|stem|head|layers.0|list.0|dict.left|stem.linear"});
  CHECK(applied.to_string() ==
        "region: layers.0 (BlockImpl)\n"
        "no region: stem (BlockImpl): ModelImpl calls its member through the member's own type, so "
        "remat cannot intercept the call. Hint: declare the member stem of ModelImpl as "
        "remat::Checkpointed<BlockImpl>.\n"
        "no region: stem.linear (torch::nn::LinearImpl): BlockImpl calls its member through the "
        "member's own type, so remat cannot intercept the call. Hint: declare the member linear of "
        "BlockImpl as remat::Checkpointed<torch::nn::LinearImpl>.\n"
        "no region: layers (torch::nn::SequentialImpl): a Sequential is called through its own "
        "type, so remat cannot intercept the call. Hint: choose its elements (name=layers.*), or "
        "call remat::checkpoint_sequential(sequential, segments, x).\n"
        "no region: list (torch::nn::ModuleListImpl): it has no forward, so it cannot be a region. "
        "Hint: choose its elements: name=list.*.\n"
        "no region: list.0 (BlockImpl): an element of a ModuleList is called through its own type, "
        "so remat cannot intercept the call. Hint: fill the list with "
        "push_back(remat::Checkpointed<BlockImpl>(...)), and call "
        "list[i]->as<remat::Checkpointed<BlockImpl>>()->forward(...).\n"
        "no region: dict (torch::nn::ModuleDictImpl): it has no forward, so it cannot be a region. "
        "Hint: choose its elements: name=dict.*.\n"
        "no region: dict.left (BlockImpl): an element of a ModuleDict is called through its own "
        "type, so remat cannot intercept the call. Hint: put a remat::Checkpointed<BlockImpl>(...) "
        "into the dictionary, and call "
        "dict[\"left\"]->as<remat::Checkpointed<BlockImpl>>()->forward(...).\n"
        "no region: head (torch::nn::LinearImpl): ModelImpl calls its member through the member's "
        "own type, so remat cannot intercept the call. Hint: declare the member head of ModelImpl "
        "as remat::Checkpointed<torch::nn::LinearImpl>.\n");
  const auto root = apply_checkpointing(*model, {.type = "Model"});
  CHECK(root.to_string() ==
        "no region: the root (ModelImpl): the program calls the root of the tree through its own "
        "type, so remat cannot intercept the call. Hint: call remat::checkpoint(module, ...), or "
        "create the module as remat::Checkpointed<ModelImpl>(...).\n");
  CHECK(root.regions.empty());
  remove_checkpointing(*model);

  SECTION("all or nothing") {
    CHECK(text_of_error([&] { require_checkpointing(*model, {.name = "layers.0|head"}); }) ==
          "remat::require_checkpointing: 1 of 2 chosen modules cannot be made regions from "
          "outside; no module was changed.\n"
          "  head (torch::nn::LinearImpl): ModelImpl calls its member through the member's own "
          "type, so remat cannot intercept the call. Hint: declare the member head of ModelImpl as "
          "remat::Checkpointed<torch::nn::LinearImpl>.");
    CHECK(remove_checkpointing(*model).empty());
  }
  SECTION("a child that the Sequential does not call") {
    model->layers->replace_module("1", Block());
    const auto replaced = apply_checkpointing(*model, {.name = "layers.1"});
    REQUIRE(replaced.refused.size() == 1);
    CHECK(replaced.refused[0].reason ==
          "replace_module() registered it in the Sequential, but the Sequential still calls the "
          "former module");
    CHECK_THAT(replaced.refused[0].cure, contains("build the Sequential again"));
  }
}

TEST_CASE("a Checkpointed that is called past its own forward is found, with what to write",
          "[apply][module]") {
  const Seed seed;
  struct NetImpl : nn::Module {
    NetImpl() : list(Checkpointed<BlockImpl>(), Checkpointed<BlockImpl>()) {
      register_module("list", list);
      member = Block(std::shared_ptr<BlockImpl>(
          register_module("member", Checkpointed<BlockImpl>().ptr())));  // a plain holder
    }
    nn::ModuleList list;
    Block member = nullptr;
  };
  NetImpl net;
  const Tensor x = leaf({2, 4});
  const auto right = [&](int i) {
    return net.list[static_cast<std::size_t>(i)]->as<Checkpointed<BlockImpl>>()->forward(x);
  };
  const auto wrong = [&](int i) {
    return net.list[static_cast<std::size_t>(i)]->as<Block>()->forward(x);
  };
  const auto unused_in = [&](const Tensor& result) {
    Paths paths;
    for (const auto& unused : unused_regions(net, result)) paths.push_back(unused.path);
    return paths;
  };

  SECTION("with the texts") {
    const Counted done;
    Tensor result = right(0) + wrong(1);
    CHECK(done.now().frames_created == 1);
    auto found = unused_regions(net, result);
    REQUIRE(found.size() == 1);
    CHECK(found[0].path == "list.1");
    CHECK(found[0].type == "remat::Checkpointed<BlockImpl>");
    CHECK(found[0].reason ==
          "list.1 (remat::Checkpointed<BlockImpl>) is switched on, and its parameters are in the "
          "graph, but its own forward was never called: the program called the forward of "
          "BlockImpl, which is not virtual, or the forwards of its children");
    CHECK(found[0].cure ==
          "call it as [i]->as<remat::Checkpointed<BlockImpl>>()->forward(...), instead of "
          "as<BlockImpl>()");
    result.sum().backward();  // and after it
    CHECK(unused_in(result) == Paths{"list.1"});

    result = net.member(x);  // list.1 is not in this graph
    found = unused_regions(net, result);
    REQUIRE(found.size() == 1);
    CHECK(found[0].path == "member");
    CHECK(found[0].cure ==
          "hold and call it as a remat::Checkpointed<BlockImpl>, instead of through a holder, "
          "shared pointer or reference of BlockImpl");
  }
  SECTION("what is off, or ran plainly for a reason, is not") {
    net.list[0]->as<Checkpointed<BlockImpl>>()->set_checkpointing(false);
    CHECK(unused_in(wrong(0)).empty());
    CHECK(unused_in(wrong(1)) == Paths{"list.1"});
    net.eval();
    CHECK(unused_in(wrong(1)).empty());
    net.train();
    {
      const at::NoGradGuard no_grad;
      right(1);  // leaves nothing in a graph
    }
    CHECK(unused_in(wrong(1)) == Paths{"list.1"});
    const remat::DisableCheckpointGuard off;
    CHECK(unused_in(right(1)).empty());
  }
  SECTION("never means since it was made, or since a reset") {
    right(1);
    CHECK(unused_in(wrong(1)).empty());
    reset_unused_regions(net);
    CHECK(unused_in(wrong(1)) == Paths{"list.1"});
    CHECK(unused_in(right(1)).empty());
  }
  SECTION("a call in eval mode, or of a module that was off, does not count") {
    net.eval();
    right(1);
    net.train();
    net.list[0]->as<Checkpointed<BlockImpl>>()->set_checkpointing(false);
    right(0);
    net.list[0]->as<Checkpointed<BlockImpl>>()->set_checkpointing(true);
    CHECK(unused_in(wrong(0) + wrong(1)) == Paths{"list.0", "list.1"});
  }
  SECTION("frozen modules are in no graph") {
    for (Tensor& parameter : net.list[1]->parameters()) parameter.requires_grad_(false);
    CHECK(unused_in(wrong(1)).empty());
  }
  SECTION("a result without a graph is an error") {
    CHECK_THAT(text_of_error([&] { static_cast<void>(unused_regions(net, at::ones({1}))); }),
               contains("remat::unused_regions: the result had no graph."));
    CHECK_THROWS_AS(unused_in(Tensor()), c10::ValueError);
  }
}

TEST_CASE("an element that was switched on and is called past the Sequential is found", "[apply]") {
  const Seed seed;
  nn::Sequential net(Block(4), Block(4));
  require_checkpointing(*net, {.name = "1"});
  const Tensor x = leaf({2, 4});
  const Tensor result = net->ptr(1)->as<Block>()->forward(net->ptr(0)->as<Block>()->forward(x));
  const auto found = unused_regions(*net, result);
  REQUIRE(found.size() == 1);
  CHECK(found[0].path == "1");
  CHECK(found[0].type == "BlockImpl");
  CHECK(found[0].reason ==
        "1 (BlockImpl) was switched on as an element of a Sequential, and its parameters are in "
        "the graph, but the Sequential never called it: the program called the module through its "
        "own type");
  CHECK(found[0].cure ==
        "call the Sequential, or its elements (for (auto& element : *sequential) x = "
        "element.forward(x)), instead of sequential->ptr(i)->as<BlockImpl>()->forward(...)");
  CHECK(unused_regions(*net, net->forward(x)).empty());

  // A Checkpointed that a Sequential was given as what it wraps.
  nn::Sequential past;
  past->push_back(std::static_pointer_cast<BlockImpl>(Checkpointed<BlockImpl>().ptr()));
  const auto unused = unused_regions(*past, past->forward(x));
  REQUIRE(unused.size() == 1);
  CHECK(unused[0].cure ==
        "add it with push_back() as a remat::Checkpointed<BlockImpl>: the Sequential holds a "
        "BlockImpl, and calls that one");
  require_checkpointing(*past, {.name = "0"});
  CHECK(unused_regions(*past, past->forward(x)).empty());
}
