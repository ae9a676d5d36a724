// How a cache takes the rows of a batch in: hits are touched, misses get a slot or a line of the overflow, dirty rows
// that give way go down or to the overflow, and what is not here is fetched. A failure leaves the cache as it was, but
// for recency.
#pragma once
#include "cached_tier.h"

namespace tierbed {

// Distinct rows of a batch, buckets ascending.
struct Asked {
    const u32* tables;
    const u64* hashes;
    const std::size_t* begin;  // [BUCKETS + 1]
    const u64* own;            // [n] lines of rows that are not to be looked for, 0 for others; or null
    u32 number;                // of the batch
};

// Locks again at the end of a scope.
struct Relock {
    explicit Relock(std::unique_lock<std::mutex>& lock) : lock_(lock) {}
    ~Relock() { lock_.lock(); }
    std::unique_lock<std::mutex>& lock_;
};

class Admission {
public:
    // lines [n]: where each row is, once `run` has ended.
    Admission(CachedTier& tier, const Asked& asked, u64* lines);
    void run(bool fetch, std::unique_lock<std::mutex>& directory);

private:
    struct Missing {
        u32 row, next;
    };
    struct Displaced {
        u32 slot;
        u8 tag;
        Way way;
    };
    struct Elsewhere {
        u32 row, entry;
    };
    // What becomes of the rows of a bucket.
    struct Part {
        std::vector<Missing> missing;
        std::vector<Displaced> displaced;         // what was in the slots that were taken
        std::vector<u32> placed, unplaced, added;  // rows to fetch: in slots, in no slot, and the entries of those
        std::vector<Elsewhere> rescued, kept;     // rows that the overflow has: in slots, and in no slot
        CacheCounts counts;
    };

    void look(u32 bucket);
    void place(Part& part);
    void make_room(std::unique_lock<std::mutex>& directory);
    void take_from_overflow();
    void fetch(std::unique_lock<std::mutex>& directory);
    void put_back();  // before the lines of slots were overwritten
    void drop();      // rows that could not be fetched

    CachedTier& tier_;
    const Asked& asked_;
    u64* lines_;
    std::vector<Part> parts_;
};

}  // namespace tierbed
