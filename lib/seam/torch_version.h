#pragma once
// Checks that the LibTorch of this process is the one that the library was built for.

namespace remat::seam {

/// Throws CheckpointError of kind Unsupported for another minor version, in which classes that the
/// library derives from have another layout. Takes microseconds; called once.
void refuse_other_torch();

}  // namespace remat::seam
