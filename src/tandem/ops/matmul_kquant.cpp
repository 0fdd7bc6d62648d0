// Kernels of the types in quant/kquant.h.
#include "ops/matmul_table.h"
#include "quant/kquant.h"

namespace tandem {

using namespace quant;

const Kernels kKKernels[] = {
    kernels_of<Q2_K>(),
    kernels_of<Q3_K>(),
    kernels_of<Q4_K>(),
    kernels_of<Q5_K>(),
    kernels_of<Q6_K>(),
};
const int kKCount = sizeof(kKKernels) / sizeof(Kernels);

}  // namespace tandem
