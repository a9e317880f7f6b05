#pragma once
// What types are called in texts for users.

#include <string>
#include <typeinfo>

namespace remat {

/// A class as it is written in code: without unnamed namespaces, a Checkpointed by the name of its
/// holder.
std::string written_type(const std::type_info& type);
/// The `BlockImpl` of a `remat::Checkpointed<BlockImpl>`; others as they are.
std::string plain_type(const std::string& written);
/// What people call a module of this class: a `Checkpointed` as what it wraps, without namespaces
/// in front and `Impl` behind. Lives as long as the process. Threads: any.
const std::string& short_type(const std::type_info& type);

}  // namespace remat
