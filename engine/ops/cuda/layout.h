// The line shape that kernels are compiled for, and how many lanes of a warp share a line.
#pragma once
#include "ops/kernels/line.h"
#include "ops/kernels/initialise.h"
#include "items.h"

namespace tierbed {

constexpr LineShape SHAPE{TIERBED_DIM,          TIERBED_WIDTH,           TIERBED_LINE_BYTES, TIERBED_EMBEDDING::TYPE,
                          TIERBED_STATES::TYPE, TIERBED_NUM_16BIT_STATES};

TIERBED_FN constexpr u32 count_lanes(u32 words) {
    u32 lanes = 1;
    while (lanes < words && lanes < 32) lanes *= 2;
    return lanes;
}
constexpr u32 COPY_LANES = count_lanes((TIERBED_DIM + 3) / 4);  // 16 bytes per lane
constexpr u32 COLUMN_LANES = count_lanes(TIERBED_DIM);
constexpr u32 WARP = 32;

}  // namespace tierbed
