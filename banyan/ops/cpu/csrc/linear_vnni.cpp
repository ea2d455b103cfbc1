// Projections with vpdpbusd.
#include "linear.h"
#include "vec.h"
#include "linear_panel.inl"
#include "linear_quantize.inl"
#include "linear_vnni.inl"
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
