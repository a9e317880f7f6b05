// expect: takes modules with one forward, which is no template
#include <torch/nn/modules/container/sequential.h>

#include "remat/module.h"

void f() { remat::Checkpointed<torch::nn::SequentialImpl> chain; }
