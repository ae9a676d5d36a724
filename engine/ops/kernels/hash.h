// The hashes of a row key.
//
// `hash_row` is the same everywhere: its top 6 bits are the bucket, and other bits choose the owner among ranks.
//
// `SlotHash` depends on a random number of the process. It has the same bucket in its top 6 bits; its other bits choose
// slots, cache sets and tags. So nobody can choose ids that share slots. Batches and all structures in memory have this
// hash alone, under the name `hash`. No file, rank, row or decision depends on it.
//
// For one table each hash is a bijection of the key: (table, hash) identifies a row as (table, key) does, so no key is
// hashed twice and an index stores no keys.
#pragma once
#include "portable.h"

namespace tierbed {

constexpr u32 BUCKETS = 64;
constexpr u32 MAX_RANKS = 1024;

TIERBED_FN u64 table_offset(u32 table) { return (static_cast<u64>(table) + 1) * 0x9E3779B97F4A7C15ull; }

// splitmix64's finaliser over the key, mixed with the table, without its last shift
TIERBED_FN u64 mixed_key(u32 table, u64 key) {
    u64 x = key ^ table_offset(table);
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    return x * 0x94D049BB133111EBull;
}

TIERBED_FN u64 shifted(u64 mixed) { return mixed ^ mixed >> 31; }

TIERBED_FN u64 hash_row(u32 table, u64 key) { return shifted(mixed_key(table, key)); }

TIERBED_FN u32 bucket_of(u64 hash) { return static_cast<u32>(hash >> 58); }

// The rank, of `ranks` <= MAX_RANKS, that owns a row: each owns an interval of 16 bits of `hash_row`.
TIERBED_FN u32 owner_of(u64 hash, u32 ranks) { return static_cast<u32>((hash >> 34 & 0xFFFF) * ranks >> 16); }

TIERBED_FN u64 reversed_bytes(u64 x) {  // compilers know this pattern
    x = (x & 0x00FF00FF00FF00FFull) << 8 | (x >> 8 & 0x00FF00FF00FF00FFull);
    x = (x & 0x0000FFFF0000FFFFull) << 16 | (x >> 16 & 0x0000FFFF0000FFFFull);
    return x << 32 | x >> 32;
}

// `mixed_key` times a random factor, folded, times another. The top byte, which has the bucket, is moved to the bottom
// and back, as factors of 1 modulo 256 do not change it there.
//
// A random odd factor gives any two keys the same m leading bits with a probability of at most 2 / 2^m (Dietzfelbinger,
// Hagerup, Katajainen, Penttonen: A reliable randomized algorithm for the closest-pair problem, 1997). That does not
// suffice for linear probing: a product maps sequences to sequences (Patrascu, Thorup: On the k-independence required
// by linear probing and minwise independence, 2010). The fold, after a random addend, and the second factor break them.
struct SlotHash {
    u64 addend, of_table;        // multiples of 256
    u64 factor[2], inverse[2];  // modulo 2^64

    TIERBED_FN u64 operator()(u32 table, u64 key) const {
        u64 x = mixed_key(table, key);
        x = (x << 8 | x >> 56) * factor[0] + table * of_table + addend;
        return reversed_bytes(folded(x) * factor[1]);
    }
    // `hash_row` of the row with this slot hash.
    TIERBED_FN u64 row_hash(u32 table, u64 hash) const { return shifted(mixed(table, hash)); }
    // The key of a slot hash: undoes each step, by the inverses of factors.
    TIERBED_FN u64 key(u32 table, u64 hash) const {
        u64 x = mixed(table, hash) * 0x319642B2D24D8EC3ull;
        x ^= x >> 27 ^ x >> 54;
        x *= 0x96DE1B173F119089ull;
        x ^= x >> 30 ^ x >> 60;
        return x ^ table_offset(table);
    }

private:
    TIERBED_FN static u64 folded(u64 x) { return x ^ (x >> 32 & ~u64{255}); }  // its own inverse
    TIERBED_FN u64 mixed(u32 table, u64 hash) const {
        const u64 x = (folded(reversed_bytes(hash) * inverse[1]) - table * of_table - addend) * inverse[0];
        return x >> 8 | x << 56;
    }
};

#ifndef TIERBED_GPU
// Of this process. Derived from the environment's TIERBED_HASH_SEED where that is set, a whole number.
extern const SlotHash slot_hash __attribute__((visibility("hidden")));

TIERBED_FN u64 key_of(u32 table, u64 hash) { return slot_hash.key(table, hash); }
#endif

}  // namespace tierbed
