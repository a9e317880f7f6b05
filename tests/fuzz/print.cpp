// Writes a program as readable text.

#include <set>
#include <sstream>

#include "tests/fuzz/operators.h"
#include "tests/fuzz/program.h"
#include "tests/support/stateful_module.h"

namespace fuzz {

namespace {

/// The values that exist at a place, to print the value that an operand really means.
using Visible = std::set<int>;

std::string value(int id) { return "v" + std::to_string(id); }

std::string operand(const Visible& visible, int id) {
  const auto next = visible.upper_bound(id);
  return value(next == visible.begin() ? *next : *std::prev(next));
}

template <class Range, class Text>
std::string joined(const Range& range, Text text) {
  std::string all;
  for (const auto& element : range) all += (all.empty() ? "" : ", ") + text(element);
  return all;
}

const char* packing_name(Packing packing) {
  static constexpr const char* names[] = {"vector",
                                          "separate",
                                          "map",
                                          "unordered_map",
                                          "optional and tuple",
                                          "struct",
                                          "List",
                                          "variant",
                                          "vector with an undefined tensor"};
  return names[static_cast<int>(packing)];
}

std::string options_text(const RegionSpec& r) {
  static constexpr const char* checks[] = {"None", "Metadata", "Layout", "Values"};
  std::string text = std::string(packing_name(r.packing)) + ", check " + checks[r.determinism];
  if (!r.preserve_rng) text += ", preserve_rng_state off";
  if (!r.early_stop) text += ", early_stop off";
  if (r.debug) text += ", debug";
  if (r.scopes) text += ", context_fn";
  if (r.strict) text += ", strict_unpack";
  if (r.fingerprint) text += ", fingerprint";
  if (r.copies) text += ", inputs copied";
  if (r.moves_inputs) text += ", inputs moved";
  if (r.named) text += ", named";
  if (r.policy.kind != PolicySpec::Kind::None) {
    static constexpr const char* kinds[] = {
        "nothing", "everything",    "operators",       "offloaded operators", "function",
        "names",   "all but names", "offloaded names", "operators | names"};
    text += std::string(", keeps ") + kinds[static_cast<int>(r.policy.kind)] + " " +
            std::to_string(r.policy.salt);
    if (r.policy.allows_mutation) text += " (allow_cache_entry_mutation)";
    if (r.policy.through_hooks) text += " (save_through_hooks)";
    if (r.policy.asks_again) text += " (ask_again)";
  }
  if (r.checkpointed_form) text += ", checkpointed()";
  return text;
}

const char* look_name(Look look) {
  static constexpr const char* names[] = {"grad()",         "is_leaf()",   "requires_grad()",
                                          "retains_grad()", "output_nr()", "is_same(a leaf)"};
  return names[static_cast<int>(look)];
}

const char* sharing_text(Sharing sharing) {
  static constexpr const char* texts[] = {"", ", steps in a GraphExecGroup",
                                          ", steps under a RecomputeCacheGuard",
                                          ", steps under a small RecomputeCacheGuard"};
  return texts[static_cast<int>(sharing)];
}

const char* wrap_name(Kind kind) {
  switch (kind) {
    case Kind::NoGrad:
      return "no grad";
    case Kind::WithGrad:
      return "grad mode on";
    case Kind::EarlyStop:
      return "EarlyStopGuard(true)";
    case Kind::NoEarlyStop:
      return "EarlyStopGuard(false)";
    case Kind::Debug:
      return "DebugGuard(true)";
    case Kind::Hooks:
      return "SavedTensorHooksGuard";
    case Kind::Offload:
      return "offload to the";
    case Kind::Toggle:
      return "requires_grad_(false), and back,";
    case Kind::Autocast:
      return "autocast";
    case Kind::Provider:
      return "StateProviderGuard";
    case Kind::Generator:
      return "GeneratorGuard";
    case Kind::Observer:
      return "RecomputeObserverGuard";
    case Kind::Catch:
      return "try";
    default:
      return "?";
  }
}

void print(const Block& block, const std::string& indent, int leaves, Visible& visible,
           std::ostream& out) {
  auto seen = [&](int id) { return operand(visible, id); };
  for (const Statement& s : block) {
    out << indent;
    std::vector<int> outs;
    for (int i = 0; i < s.outs; ++i) outs.push_back(s.out + i);
    switch (s.kind) {
      case Kind::Operator:
      case Kind::Write:
        out << joined(outs, value) << " = " << operators()[s.op].name << "(" << joined(s.args, seen)
            << ")   # " << (s.kind == Kind::Write ? "of an argument, " : "") << "salt " << s.salt
            << "\n";
        break;
      case Kind::InnerGrad:
        out << value(s.out) << " = grad of " << seen(s.args[0]) << " for " << seen(s.args[1])
            << (s.salt % 10 == 0 ? "" : ", retain_graph")
            << (s.salt % 4 < 2 ? ", create_graph" : "") << "\n";
        break;
      case Kind::Read:
        out << joined(outs, value) << " = saved by " << seen(s.args[0]) << ", or by "
            << (s.salt / 2 % 2 == 0 ? "SavesInput" : "SavesOutput") << " of it"
            << (s.salt % 2 == 0 ? ", with its history\n" : "\n");
        break;
      case Kind::Name:
        out << value(s.out) << " = checkpoint_name(" << seen(s.args[0]) << ", \"n"
            << s.salt % num_names << "\")\n";
        break;
      case Kind::Pin:
        out << value(s.out) << " = pin(" << seen(s.args[0]) << ")\n";
        break;
      case Kind::Stretch: {
        const RegionSpec& r = s.region;
        auto argument = [&](const auto& a) { return value(a.second) + " = " + seen(a.first); };
        out << joined(r.results, [](const auto& p) { return value(p.second); }) << " = "
            << (r.inlined ? "call" : "save_region") << "(" << joined(r.args, argument) << ")\n";
        Visible inside = visible;
        for (const auto& [outer, inner] : r.args) inside.insert(inner);
        print(s.block, indent + "  ", leaves, inside, out);
        out << indent << "  return "
            << joined(r.results, [&](const auto& p) { return operand(inside, p.first); }) << "\n";
        for (const auto& [inner, outer] : r.results) visible.insert(outer);
        break;
      }
      case Kind::Copy:
        out << value(s.out) << " = " << seen(s.args[0])
            << (s.salt % 2 == 0 ? ".clone()\n" : ".detach().clone()\n");
        break;
      case Kind::Look:
        out << value(s.out) << " = " << seen(s.args[1]) << ", changed by " << seen(s.args[0]) << "."
            << look_name(look_of(s)) << (s.salt / 16 % 2 == 0 ? ", a branch\n" : ", a product\n");
        break;
      case Kind::Register: {
        static constexpr const char* texts[] = {".retain_grad()\n", ".register_hook(g * 2)\n",
                                                ".register_hook(g + 1)\n"};
        out << seen(s.args[0]) << texts[static_cast<int>(hook_of(s))];
        break;
      }
      case Kind::Call:
        out << value(s.out) << " = m" << s.op << "(" << seen(s.args[0]) << ")   # "
            << (s.region.inlined ? "no region" : options_text(s.region)) << ", salt " << s.salt
            << "\n";
        break;
      case Kind::Throw:
        out << "throw\n";
        break;
      case Kind::Fuse:
        out << "fuse\n";
        break;
      case Kind::Region: {
        const RegionSpec& r = s.region;
        auto argument = [&](const auto& a) { return value(a.second) + " = " + seen(a.first); };
        out << joined(r.results, [](const auto& p) { return value(p.second); }) << " = "
            << (r.inlined ? "call" : "checkpoint") << "(" << joined(r.args, argument) << ")"
            << (r.captures.empty() ? "" : " capturing ") << joined(r.captures, seen) << "   # "
            << options_text(r) << "\n";
        Visible inside(r.captures.begin(), r.captures.end());
        for (int i = 0; i < leaves; ++i) inside.insert(i);
        for (const auto& [outer, inner] : r.args) inside.insert(inner);
        print(s.block, indent + "  ", leaves, inside, out);
        out << indent << "  return "
            << joined(r.results, [&](const auto& p) { return operand(inside, p.first); }) << "\n";
        for (const auto& [inner, outer] : r.results) visible.insert(outer);
        break;
      }
      default:
        out << wrap_name(s.kind);
        if (s.kind == Kind::Hooks) {
          static constexpr const char* functions[] = {"identity", "clone", "doubled", "struct"};
          out << " " << functions[s.salt % 4];
        }
        if (s.kind == Kind::Offload)
          out << " " << (s.salt % 3 == 0 ? "CPU" : s.salt % 3 == 1 ? "disk" : "tiers");
        if (s.kind == Kind::Toggle)
          out << " of " << seen(s.args[0]) << (s.salt % 2 == 0 ? ", put back by a guard" : "");
        if (s.kind == Kind::Provider || s.kind == Kind::Generator) out << " " << s.salt % 2;
        out << "\n";
        print(s.block, indent + "  ", leaves, visible, out);
        if (s.kind == Kind::Catch) out << indent << "catch (...)\n";
    }
    visible.insert(outs.begin(), outs.end());
  }
}

void print(const Step& step, const Visible& visible, std::ostream& out) {
  auto seen = [&](int id) { return operand(visible, id); };
  if (step.kind == Step::Kind::Mutate) {
    out << "change " << seen(step.target) << " in place, salt " << step.salt << "\n";
    return;
  }
  if (step.kind == Step::Kind::Again) {
    out << "all of it again\n";
    return;
  }
  if (step.kind == Step::Kind::Replace) {
    static constexpr const char* means[] = {"set_data", "set_data to other strides", "set_",
                                            "resize_"};
    out << "give the leaf " << value(step.target) << " another storage by "
        << means[static_cast<int>(means_of(step))] << "\n";
    return;
  }
  out << (step.kind == Step::Kind::Grad ? "grad" : "backward") << " of "
      << joined(step.outputs, seen);
  if (!step.inputs.empty()) out << " for " << joined(step.inputs, value);
  if (step.order > 1) out << ", create_graph to order " << step.order;
  if (step.retain) out << ", retain_graph";
  if (step.in_no_grad) out << ", in no_grad";
  if (step.in_thread) out << ", in a thread";
  if (step.hooks) out << ", under hooks";
  if (step.fuse >= 0) out << ", fuse " << step.fuse;
  if (step.out_of_memory >= 0) out << ", memory for " << step.out_of_memory << " bytes";
  out << "\n";
}

}  // namespace

std::string to_text(const Program& program) {
  std::ostringstream out;
  out << "seed " << program.seed << (program.large ? ", large" : "")
      << (program.all_values ? ", all regions compare values" : "")
      << (program.drop_values ? ", only outputs are kept" : "") << sharing_text(program.sharing)
      << "\n";
  for (size_t i = 0; i < program.leaves.size(); ++i) {
    static constexpr const char* kinds[] = {"input", "parameter", "buffer"};
    const Leaf& leaf = program.leaves[i];
    out << "  " << value(static_cast<int>(i)) << " = " << kinds[static_cast<int>(leaf.kind)] << " ["
        << joined(leaf.sizes, [](int64_t n) { return std::to_string(n); }) << "] "
        << (leaf.is_double ? "double" : "float") << (leaf.has_grad ? " with a grad" : "") << "\n";
  }
  for (size_t i = 0; i < program.modules.size(); ++i) {
    static constexpr const char* forms[] = {"module", "Checkpointed", "element of a Sequential"};
    const ModuleSpec& module = program.modules[i];
    const auto name = [](int state) {
      return std::string(name_of(static_cast<remat::testing::State>(state)));
    };
    out << "  m" << i << " = " << forms[static_cast<int>(module.form)] << " of "
        << joined(module.states, name) << "; weight " << value(module.weight);
    if (module.inner >= 0) out << ", calls m" << module.inner;
    out << ", salt " << module.salt << "\n";
  }
  const int leaves = static_cast<int>(program.leaves.size());
  Visible visible;
  for (int i = 0; i < leaves; ++i) visible.insert(i);
  print(program.block, "  ", leaves, visible, out);
  for (const Step& step : program.steps) print(step, visible, out);
  return out.str();
}

}  // namespace fuzz
