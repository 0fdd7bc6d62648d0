// Kernels of the types in quant/legacy.h.
#include "ops/matmul_table.h"
#include "quant/legacy.h"

namespace tandem {

using namespace quant;

const Kernels kLegacyKernels[] = {
    kernels_of<Q4_0>(),
    kernels_of<Q4_1>(),
    kernels_of<Q5_0>(),
    kernels_of<Q5_1>(),
    kernels_of<Q8_0>(),
};
const int kLegacyCount = sizeof(kLegacyKernels) / sizeof(Kernels);

}  // namespace tandem
