#include "ops/kernels/hash.h"

#include <cstdlib>
#include <random>

namespace tierbed {
namespace {

u64 invert_modulo_2_64(u64 odd) {
    u64 inverse = odd;  // 3 bits are correct; each Newton iteration doubles the number of correct bits
    for (int i = 0; i < 5; ++i) inverse *= 2 - odd * inverse;
    return inverse;
}

SlotHash make_slot_hash(u64 seed) {
    auto draw = [&, count = 0u]() mutable { return hash_row(count++, seed) << 8; };
    SlotHash hash{draw(), draw(), {draw() | 1, draw() | 1}, {}};
    for (int i = 0; i < 2; ++i) hash.inverse[i] = invert_modulo_2_64(hash.factor[i]);
    return hash;
}

u64 choose_seed() {
    if (const char* const text = std::getenv("TIERBED_HASH_SEED")) return std::strtoull(text, nullptr, 0);
    std::random_device random;
    return u64{random()} << 32 | random();
}

}  // namespace

const SlotHash slot_hash = make_slot_hash(choose_seed());

}  // namespace tierbed
