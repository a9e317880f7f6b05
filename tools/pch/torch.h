// Precompiled for the examples and benchmarks: torch/torch.h takes the compiler longer than one of
// them.
#include <torch/torch.h>
