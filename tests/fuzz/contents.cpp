// Finds the contents of a block.

#include <algorithm>

#include "tests/fuzz/operators.h"
#include "tests/fuzz/program.h"

namespace fuzz {

namespace {

void look(const Block& block, int depth, Contents& found) {
  for (const Statement& s : block) {
    ++found.statements;
    if (s.kind == Kind::Operator || s.kind == Kind::Write) {
      const Operator& op = operators()[s.op];
      found.random |= op.random;
      found.inplace |= op.inplace && s.kind == Kind::Operator;
      found.reads_twice |= op.reads_twice;
      found.writes_late |= op.writes_late;
      found.writes_inside |= op.writes_inside;
      found.backward_in_hook |= op.backward_in_hook;
    }
    found.writes_arguments |= s.kind == Kind::Write;
    found.looks |= s.kind == Kind::Look;
    found.inner_grad |= s.kind == Kind::InnerGrad;
    found.hooks |= s.kind == Kind::Hooks || s.kind == Kind::Offload;
    found.keeping_hooks |= s.kind == Kind::Hooks && s.salt % 4 % 3 == 0;
    found.no_grad |= s.kind == Kind::NoGrad;
    found.catches |= s.kind == Kind::Catch;
    found.stretches |= s.kind == Kind::Pin || s.kind == Kind::Stretch || s.kind == Kind::Name;
    const bool has_policy = s.region.policy.kind != PolicySpec::Kind::None;
    found.policies |= has_policy;
    found.keeps_unchanged |= s.kind == Kind::Pin || s.kind == Kind::Stretch ||
                             (has_policy && !s.region.policy.allows_mutation);
    found.captures |= !s.region.captures.empty();
    const bool is_region = (s.kind == Kind::Region || s.kind == Kind::Call) && !s.region.inlined;
    found.regions += is_region;
    found.depth = std::max(found.depth, depth + is_region);
    look(s.block, depth + is_region, found);
  }
}

}  // namespace

Contents contents(const Block& block) {
  Contents found;
  look(block, 0, found);
  return found;
}

}  // namespace fuzz
