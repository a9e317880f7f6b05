#pragma once
// Copies of storages that share memory with the original until one of them is written to.
//
// Note [Copies on write]
// Before LibTorch returns a mutable pointer to a storage's memory, it calls the storage's
// materializer. The original and its copies own the memory together. When the original is about to
// be written, each copy gets memory of its own with the present contents. A copy that is about to
// be written gets its own memory alone. A storage that dies, or is resized, leaves the memory to
// the others.
//
// LibTorch's own lazy copies (c10/core/impl/COW.h) give new memory to the first writer. That may be
// the user's tensor, whose address a program may hold (an accessor, an Eigen map, a buffer that
// others fill). With the last copy its memory would be freed while such a pointer is in use.
//
// Writes without LibTorch, or through a pointer that was obtained before, are not detected. So
// memory from outside is not shared here, and callers that need certainty compare versions as well.

#include <c10/core/StorageImpl.h>

namespace remat::seam {

/// Returns a storage with the same bytes. Null if it would have to copy them at once: memory that
/// is not on the CPU or not of LibTorch's allocator, and every LibTorch before 2.13. Any thread,
/// but no thread may write to the storage meanwhile.
c10::intrusive_ptr<c10::StorageImpl> lazy_copy(c10::StorageImpl& storage);

}  // namespace remat::seam
