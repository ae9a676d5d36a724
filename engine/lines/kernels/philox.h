// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once
#include "portable.h"

namespace tierbed {

struct Words {
    u32 x[4];
};

// A pure function: the same 128-bit counter and 64-bit key give the same four words anywhere.
TIERBED_FN Words philox(Words counter, u64 key) {
    u32 k0 = static_cast<u32>(key), k1 = static_cast<u32>(key >> 32);
    Words c = counter;
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = multiply_high(0xD2511F53u, c.x[0]), low0 = 0xD2511F53u * c.x[0];
        const u32 high1 = multiply_high(0xCD9E8D57u, c.x[2]), low1 = 0xCD9E8D57u * c.x[2];
        c = Words{{high1 ^ c.x[1] ^ k0, low1, high0 ^ c.x[3] ^ k1, low0}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

}  // namespace tierbed
