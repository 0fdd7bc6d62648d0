// Kernels of the types in quant/iquant.h and quant/iquant4.h.
#include "ops/matmul_table.h"
#include "quant/iquant.h"
#include "quant/iquant4.h"

namespace tandem {

using namespace quant;

const Kernels kIKernels[] = {
    kernels_of<IQ2_XXS>(),
    kernels_of<IQ2_XS>(),
    kernels_of<IQ2_S>(),
    kernels_of<IQ3_XXS>(),
    kernels_of<IQ3_S>(),
    kernels_of<IQ1_S>(),
    kernels_of<IQ1_M>(),
    kernels_of<IQ4_NL>(),
    kernels_of<IQ4_XS>(),
};
const int kICount = sizeof(kIKernels) / sizeof(Kernels);

}  // namespace tandem
