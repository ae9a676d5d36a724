// The hash of a row's identity. Its top 6 bits are the bucket, its low bits place the row within the bucket.
#pragma once
#include "portable.h"

namespace tierbed {

constexpr u32 BUCKETS = 64;

// splitmix64's finaliser over the key, told apart by table
TIERBED_FN u64 hash_row(u32 table, u64 key) {
    u64 x = key ^ (static_cast<u64>(table) + 1) * 0x9E3779B97F4A7C15ull;
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    x ^= x >> 31;
    return x;
}

TIERBED_FN u32 bucket_of(u64 hash) { return static_cast<u32>(hash >> 58); }

}  // namespace tierbed
