// The two hashes of a row key (table, key).
//
// `hash_row` is the same on every machine. Its top 6 bits are the bucket; other bits choose the owning rank.
//
// `SlotHash` is seeded with a random number per process, so nobody can choose ids that collide. The top 6 bits of
// `SlotHash` are the bucket, as in `hash_row`; other bits choose slots, cache sets and tags. Batches and all structures
// in memory store only this hash, as `hash`. Files, ranks, row values and decisions do not depend on `SlotHash`. Within
// a table, both hashes are bijections of the key, so (table, hash) identifies a row. A key is hashed only once.
#pragma once
#include "portable.h"

namespace tierbed {

constexpr u32 BUCKETS = 64;
constexpr u32 MAX_RANKS = 1024;

TIERBED_FN u64 get_table_offset(u32 table) { return (static_cast<u64>(table) + 1) * 0x9E3779B97F4A7C15ull; }

// splitmix64's finaliser over table and key, without its last shift
TIERBED_FN u64 mix_key(u32 table, u64 key) {
    u64 x = key ^ get_table_offset(table);
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    return x * 0x94D049BB133111EBull;
}

TIERBED_FN u64 apply_last_shift(u64 mixed) { return mixed ^ mixed >> 31; }

TIERBED_FN u64 hash_row(u32 table, u64 key) { return apply_last_shift(mix_key(table, key)); }

TIERBED_FN u32 get_bucket(u64 hash) { return static_cast<u32>(hash >> 58); }

// Returns a row's owner. Each rank owns a range of the values of `hash_row`'s bits 34 to 49. ranks <= MAX_RANKS.
TIERBED_FN u32 find_owner(u64 hash, u32 ranks) { return static_cast<u32>((hash >> 34 & 0xFFFF) * ranks >> 16); }

TIERBED_FN u64 reverse_bytes(u64 x) {  // compilers recognise this pattern
    x = (x & 0x00FF00FF00FF00FFull) << 8 | (x >> 8 & 0x00FF00FF00FF00FFull);
    x = (x & 0x0000FFFF0000FFFFull) << 16 | (x >> 16 & 0x0000FFFF0000FFFFull);
    return x << 32 | x >> 32;
}

// Multiplies `mix_key` by a random factor, folds the product and multiplies by a second factor. The top byte holds the
// bucket and must not change. So the top byte first becomes the lowest byte. Factors that are 1 modulo 256 keep it.
//
// With a random odd factor, two keys agree in m leading bits with probability at most 2 / 2^m (Dietzfelbinger, Hagerup,
// Katajainen, Penttonen: A reliable randomized algorithm for the closest-pair problem, 1997). Linear probing needs
// more: the products of evenly spaced keys are evenly spaced too (Patrascu, Thorup: On the k-independence required by
// linear probing and minwise independence, 2010). `addend`, `fold` and `factor[1]` break such sequences.
struct SlotHash {
    u64 addend, table_factor;   // multiples of 256
    u64 factor[2], inverse[2];  // modulo 2^64

    TIERBED_FN u64 operator()(u32 table, u64 key) const {
        u64 x = mix_key(table, key);
        x = (x << 8 | x >> 56) * factor[0] + table * table_factor + addend;
        return reverse_bytes(fold(x) * factor[1]);
    }
    // Returns the row's `hash_row`.
    TIERBED_FN u64 row_hash(u32 table, u64 hash) const { return apply_last_shift(unmix(table, hash)); }
    // Recovers the key by undoing each step, multiplying by the factors' inverses.
    TIERBED_FN u64 key(u32 table, u64 hash) const {
        u64 x = unmix(table, hash) * 0x319642B2D24D8EC3ull;
        x ^= x >> 27 ^ x >> 54;
        x *= 0x96DE1B173F119089ull;
        x ^= x >> 30 ^ x >> 60;
        return x ^ get_table_offset(table);
    }

private:
    TIERBED_FN static u64 fold(u64 x) { return x ^ (x >> 32 & ~u64{255}); }  // `fold` is its own inverse
    TIERBED_FN u64 unmix(u32 table, u64 hash) const {                        // the row's `mix_key`
        const u64 x = (fold(reverse_bytes(hash) * inverse[1]) - table * table_factor - addend) * inverse[0];
        return x >> 8 | x << 56;
    }
};

#ifndef TIERBED_GPU
// This process's slot hash: random, unless the environment variable TIERBED_HASH_SEED sets an integer seed.
extern const SlotHash slot_hash __attribute__((visibility("hidden")));

TIERBED_FN u64 get_key(u32 table, u64 hash) { return slot_hash.key(table, hash); }
#endif

}  // namespace tierbed
