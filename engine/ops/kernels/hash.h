// The hash of a row's identity. Its top 6 bits are the bucket, its low bits place the row within the bucket, and bits
// that do neither choose its owner among ranks.
//
// For one table the hash is a bijection of the key: (table, hash) names a row as (table, key) does, so nothing is
// hashed twice and a table's index needs no keys.
#pragma once
#include "portable.h"

namespace tierbed {

constexpr u32 BUCKETS = 64;
constexpr u32 MOST_RANKS = 1024;

TIERBED_FN u64 table_offset(u32 table) { return (static_cast<u64>(table) + 1) * 0x9E3779B97F4A7C15ull; }

// splitmix64's finaliser over the key, told apart by table
TIERBED_FN u64 hash_row(u32 table, u64 key) {
    u64 x = key ^ table_offset(table);
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    x ^= x >> 31;
    return x;
}

// The key whose hash it is: each step of hash_row undone, by the inverses of its factors modulo 2^64.
TIERBED_FN u64 key_of(u32 table, u64 hash) {
    u64 x = hash;
    x ^= x >> 31 ^ x >> 62;
    x *= 0x319642B2D24D8EC3ull;
    x ^= x >> 27 ^ x >> 54;
    x *= 0x96DE1B173F119089ull;
    x ^= x >> 30 ^ x >> 60;
    return x ^ table_offset(table);
}

TIERBED_FN u32 bucket_of(u64 hash) { return static_cast<u32>(hash >> 58); }

// The rank, of `ranks` <= MOST_RANKS, that owns a row: each owns an interval of 16 bits of the hash.
TIERBED_FN u32 owner_of(u64 hash, u32 ranks) { return static_cast<u32>((hash >> 34 & 0xFFFF) * ranks >> 16); }

}  // namespace tierbed
