// The sets of a cache: tags, ways and lines in one piece of memory each.
#pragma once
#include <vector>

#include "cache/kernels/cache_set.h"
#include "lines/native/layout.h"
#include "ops/native/memory.h"

namespace tierbed {

// A slot is a way of a set, numbered through. Different sets may be used by several threads at once.
class Cache {
public:
    // As many sets as the budget has room for, with their metadata. std::invalid_argument where it has no room for one.
    Cache(const LineShape& shape, std::size_t budget_bytes, Replacement replacement);
    Cache(const Cache&) = delete;

    // The row's slot, or NONE.
    u32 find(u64 hash, u32 table) const {
        const u32 number = set_of(hash, sets_);
        const u32 way = probe_set(THREAD, set(number), hash, table);
        return way == NONE ? NONE : number * WAYS + way;
    }
    // The slot to take for a row that no set holds, as victim_way chooses it, or NONE.
    u32 choose(u64 hash, u32 batch, u32 done) const {
        const u32 number = set_of(hash, sets_);
        const u32 way = victim_way(set(number), home_of(hash), batch, done, replacement_);
        return way == NONE ? NONE : number * WAYS + way;
    }
    // How many batches after `batch` the row of a slot is needed, NEVER for a free slot.
    u32 needed_in(u32 slot, u32 batch) const { return is_free(slot) ? NEVER : batches_until(way(slot).next, batch); }
    void take(u32 slot, const Way& row) {
        tags()[slot] = tag_of(row.hash);
        way(slot) = row;
    }
    void free(u32 slot) { tags()[slot] = 0; }

    bool is_free(u32 slot) const { return tags()[slot] == 0; }
    bool is_dirty(u32 slot) const { return tierbed::is_dirty(updates(slot), way(slot).stored); }
    Way& way(u32 slot) const { return reinterpret_cast<Way*>(ways_.start())[slot]; }
    u32 updates(u32 slot) const { return record(line(slot), shape_)->updates; }
    u64 line(u32 slot) const { return lines_.start() + static_cast<u64>(slot) * shape_.line_bytes; }

    u32 slot(u64 line) const { return static_cast<u32>((line - lines_.start()) / shape_.line_bytes); }

    // These bring memory that the next calls for the row read into the CPU's caches, in the order of those calls. They
    // are inlined, since GCC drops a call of a function that only prefetches.
    TIERBED_INLINE void fetch_tags(u64 hash) const { prefetch(set(set_of(hash, sets_)).tags); }
    TIERBED_INLINE void fetch_way(u64 hash) const {
        const SetView view = set(set_of(hash, sets_));
        const u32 home = home_of(hash);
        if (const u32 matches = tag_matches(view.tags + home, tag_of(hash)))
            prefetch(&view.ways[home + lowest_bit(matches)]);
    }
    TIERBED_INLINE void fetch_ways(u64 hash) const {
        prefetch_bytes(reinterpret_cast<u64>(set(set_of(hash, sets_)).ways + home_of(hash)), GROUP * sizeof(Way));
    }

    TIERBED_INLINE void fetch_record(u32 slot) const { prefetch(record(line(slot), shape_)); }

    u32 slots() const { return sets_ * WAYS; }
    // Whether buckets have sets of their own.
    bool splits() const { return sets_ >= BUCKETS; }
    std::size_t used() const;
    std::size_t bytes() const { return tags_.size() + ways_.size() + lines_.size(); }

private:
    u8* tags() const { return reinterpret_cast<u8*>(tags_.start()); }
    SetView set(u32 number) const { return {tags() + std::size_t{number} * WAYS, &way(number * WAYS)}; }

    LineShape shape_;
    Replacement replacement_;
    u32 sets_;
    Pages tags_, ways_, lines_;
};

}  // namespace tierbed
