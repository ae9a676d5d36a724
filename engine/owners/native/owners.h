// The unique rows of a batch in the order of the ranks that own them.
#pragma once
#include "ops/native/batch.h"

namespace tierbed {

struct OwnerOrder {
    u32 ranks;
    u32 last;            // the owner whose rows come last
    i64 *keys, *tables;  // [unique] rows by owner, those of one in the order of the batch
    i64* places;         // [unique] of each row of the batch: its place in that order
    i64* counts;         // [ranks] rows of each owner
};

// Fills the arrays of `order`.
void by_owner(const Batch& batch, const OwnerOrder& order);

}  // namespace tierbed
