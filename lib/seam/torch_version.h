#pragma once
// Whether the LibTorch of this process is the one that the library was built for.

namespace remat::seam {

/// Throws CheckpointError of kind Unsupported if it has another minor version: classes that the
/// library derives from are laid out otherwise there. Takes microseconds; called once.
void refuse_other_torch();

}  // namespace remat::seam
