// Builds the table entry of one format.
#pragma once
#include "ops/matmul_dot.h"
#include "ops/matmul_panel.h"

namespace tandem {

template <class F>
constexpr Kernels kernels_of() {
#if TANDEM_AVX512 || TANDEM_AVX2
    constexpr PanelFn panel = fill_panel<F>;
#else
    constexpr PanelFn panel = nullptr;
#endif
    return {F::type, F::block, F::bytes, panel_form<F>(), dot<F>, panel, unpack_floats<F>};
}

}  // namespace tandem
