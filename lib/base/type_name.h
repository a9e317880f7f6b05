#pragma once
// Names of types in texts for users.

#include <string>
#include <typeinfo>

namespace remat {

/// Returns a class as it is written in code: without unnamed namespaces, and a Checkpointed by the
/// name of its holder.
std::string written_type(const std::type_info& type);
/// Returns the `BlockImpl` of a `remat::Checkpointed<BlockImpl>`; other names unchanged.
std::string plain_type(const std::string& written);
/// Returns the usual name of a module of this class: a `Checkpointed` by the class that it wraps,
/// without leading namespaces and trailing `Impl`. Lives as long as the process. Threads: any.
const std::string& short_type(const std::type_info& type);

}  // namespace remat
