#pragma once
// Copies of storages that have no memory of their own until somebody writes to it.
//
// Note [Copies on write]
// Before LibTorch gives out a mutable pointer to a storage's memory, it calls the storage's
// materializer. The memory belongs to the original and its copies together; when the original is
// about to be written, each copy is given memory of its own with what is there; a copy that is
// about to be written goes by itself. Whoever dies, or is resized, leaves the memory to the others.
//
// LibTorch's own lazy copies (c10/core/impl/COW.h) give the new memory to whoever writes first.
// That may be the user's tensor, of whose address a program may have taken note (an accessor, an
// Eigen map, a buffer that others fill): with the last copy its memory would be freed under such a
// pointer.
//
// What is written past LibTorch, or through a pointer that was taken before, is not seen. So memory
// from outside is not shared here, and who needs to be sure compares versions as well.

#include <c10/core/StorageImpl.h>

namespace remat::seam {

/// Makes a storage with the same bytes. Null where that is not possible without copying them at
/// once: memory that is not on the CPU or not of LibTorch's allocator, and every LibTorch before
/// 2.13. Any thread, but none may write to the storage meanwhile.
c10::intrusive_ptr<c10::StorageImpl> lazy_copy(c10::StorageImpl& storage);

}  // namespace remat::seam
