// Projections with vpdpbusd.
#include "linear.h"
#include "vec.h"
#include "linear_panel.inl"
#include "linear_quantize.inl"
#include "linear_vnni.inl"

namespace banyan {
namespace {

// Bringing weights to bytes goes beside vpdpbusd on other ports; writing a panel of them does not.
constexpr int direct_rows(Format) { return PANEL_ROWS; }
constexpr int UNPACKED_ROWS = ROWS;

template <class Source, int R>
inline void multiply(const Source& source, int64_t blocks, const Rows& rows, int64_t row,
                     float* acc) {
  multiply_vnni<Source, R>(source, blocks, rows, row, acc);
}

}  // namespace
}  // namespace banyan

#include "linear.inl"
#include "linear_several.inl"
#include "linear_wide.inl"
#include "linear_bf16.inl"

namespace banyan {
static_assert(SEVERAL == WIDE_GROUPS && SEVERAL == PAIR_GROUPS, "one number of groups for all formats");
const LinearKernels linear_vnni = BN_LINEAR_KERNELS(
    round_pairs, pairs_unit<1>, SEVERAL, BN_OF_ROUNDED(several_unit, pairs_unit<PAIR_GROUPS>),
    BN_OF_WIDE(wide_unit));
}
