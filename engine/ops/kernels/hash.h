// The hash of a row key. Its top 6 bits are the bucket, its low bits choose the slot within the bucket, and other bits
// choose the owner among ranks.
//
// For one table the hash is a bijection of the key: (table, hash) identifies a row as (table, key) does, so no key is
// hashed twice and an index stores no keys.
#pragma once
#include "portable.h"

namespace tierbed {

constexpr u32 BUCKETS = 64;
constexpr u32 MAX_RANKS = 1024;

TIERBED_FN u64 table_offset(u32 table) { return (static_cast<u64>(table) + 1) * 0x9E3779B97F4A7C15ull; }

// splitmix64's finaliser over the key, mixed with the table
TIERBED_FN u64 hash_row(u32 table, u64 key) {
    u64 x = key ^ table_offset(table);
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    x ^= x >> 31;
    return x;
}

// The key of a hash: undoes each step of hash_row, by the inverses of its factors modulo 2^64.
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

// The rank, of `ranks` <= MAX_RANKS, that owns a row: each owns an interval of 16 bits of the hash.
TIERBED_FN u32 owner_of(u64 hash, u32 ranks) { return static_cast<u32>((hash >> 34 & 0xFFFF) * ranks >> 16); }

}  // namespace tierbed
