// Builds the table entry of one format.
#pragma once
#include "ops/matmul_dot.h"
#include "ops/matmul_panel.h"

namespace tandem {

template <class F>
constexpr Kernels kernels_of() {
#if TANDEM_AVX512
    return {F::type, F::block, F::bytes, F::group == 16, F::has_min, dot<F>, fill_panel<F>, unpack_blocks<F>};
#else
    return {F::type, F::block, F::bytes, F::group == 16, F::has_min, dot<F>, nullptr, unpack_blocks<F>};
#endif
}

}  // namespace tandem
