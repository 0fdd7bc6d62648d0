// Kernels of the types in quant/mxfp.h and quant/ternary.h.
#include "ops/matmul_table.h"
#include "quant/mxfp.h"
#include "quant/ternary.h"

namespace tandem {

using namespace quant;

const Kernels kSmallKernels[] = {
    kernels_of<MXFP4>(),
    kernels_of<NVFP4>(),
    kernels_of<TQ1_0>(),
    kernels_of<TQ2_0>(),
};
const int kSmallCount = sizeof(kSmallKernels) / sizeof(Kernels);

}  // namespace tandem
