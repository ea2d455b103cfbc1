// Projections of machines with tile registers. Weights with a scale for each block of inputs go by
// vpdpbusd as on machines without: a tile's integer sums must be stored before scales meet them, and
// while tiles work the second port does no fp32 products, so that both together take as long.
#include "linear.h"
#include "vec.h"
#include "linear_panel.inl"
#include "linear_quantize.inl"
#include "linear_vnni.inl"
#include "linear.inl"
#include "linear_several.inl"
#include "linear_wide.inl"
#include "linear_bf16_tiles.inl"

namespace banyan {
static_assert(SEVERAL == WIDE_GROUPS && SEVERAL == PAIR_GROUPS, "one number of groups for all formats");
const LinearKernels linear_amx = BN_LINEAR_KERNELS(
    round_pairs, tiles_unit<1>, SEVERAL, BN_OF_ROUNDED(several_unit, tiles_unit<PAIR_GROUPS>),
    BN_OF_WIDE(wide_unit));
}
