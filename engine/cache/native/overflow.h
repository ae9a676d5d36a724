// Lines outside of the sets, for rows that no set has room for and for rows on their way down.
#pragma once
#include <algorithm>
#include <array>
#include <vector>

#include "cache/kernels/cache_set.h"
#include "ops/native/memory.h"
#include "store/native/rows.h"

namespace tierbed {

// A place is a line for one row. Only `find` may run in several threads at once.
class Overflow {
public:
    struct Entry {
        Way way;
        bool leaving;       // whether another thread is writing the line to the tier below
        bool gone;          // whether the row left during that write: the place is free when the write is over
        bool waiting;       // whether no batch needed the row when it was last looked at: it only waits to go down
        bool evicted;       // whether the row came from a set, and was counted as it left that
        u32 before, after;  // places of rows of that chain in the order in which they came; free ones by `after`
    };

    // capacity: how many rows have memory that is kept when they leave.
    Overflow(const LineShape& shape, std::size_t capacity) : shape_(shape), capacity_(capacity) {}

    // The row's place, or NONE.
    u32 find(u64 hash, u32 table) const { return index_.find(hash, table) - 1; }
    // Makes room for so many more rows: only this and `trim` can fail for lack of memory.
    void reserve(std::size_t rows);
    // Gives a new row a place, whose line the caller fills. waiting: whether no batch needs the row. evicted: whether it was
    // counted as it left a set.
    u32 add(const Way& row, bool waiting, bool evicted = false);
    void remove(u32 place);
    // Gives back the memory beyond the capacity, where no row is in it.
    void trim();

    // Notes that no batch needs the row.
    void wait(u32 place) { move(place, true); }
    // How many rows may stay: of any kind, and where announced batches need the others.
    struct Limits {
        std::size_t keep, keep_needed;
    };
    // Takes at most `most` dirty rows whose batches are over, by hash: their places are leaving until `wrote`. Clean
    // ones go at once. Waiting rows go first, in the order in which they came.
    std::vector<u32> take(u32 done, std::size_t most, const Limits& room);
    // Ends the leaving of places. updates: of each row as it was written, or null where the write failed.
    void wrote(const std::vector<u32>& places, const std::vector<u32>* updates, u32 done);

    // Calls body(place) for each row, but for those that come meanwhile. It may remove the row.
    template <class Body>
    void for_each(const Body& body) {
        for_each_held(body);
        for_each_of(chains_[true], body);
    }
    // The same for rows that do not only wait; the body may let the row wait.
    template <class Body>
    void for_each_held(const Body& body) {
        for_each_of(chains_[false], body);
    }

    // Whether no batch pins the row and no thread writes it down.
    bool is_idle(u32 place, u32 done) const { return !at(place).leaving && !is_after(at(place).way.last, done); }
    u32 updates(u32 place) const { return record(line(place), shape_)->updates; }
    bool is_dirty(u32 place) const { return tierbed::is_dirty(updates(place), at(place).way.stored); }
    Entry& at(u32 place) { return chunks_[place / CHUNK].places[place % CHUNK]; }
    const Entry& at(u32 place) const { return chunks_[place / CHUNK].places[place % CHUNK]; }
    u64 line(u32 place) const {
        return chunks_[place / CHUNK].lines.start() + static_cast<u64>(place % CHUNK) * shape_.line_bytes;
    }

    bool empty() const { return rows_ == 0; }
    std::size_t rows() const { return rows_; }
    std::size_t peak_rows() const { return peak_; }
    // How many rows left for the tier below that were not counted as they left a set.
    u64 evictions() const { return evictions_; }
    std::size_t bytes() const;
    // The most bytes that a row takes, up to the capacity.
    static std::size_t row_bytes(const LineShape& shape) {
        return shape.line_bytes + sizeof(Entry) + RowMap::MOST_BYTES;
    }

private:
    static constexpr u32 CHUNK = 1024;  // places of a chunk at most

    struct Chunk {
        Pages lines;
        std::vector<Entry> places;
    };
    struct Chain {
        u32 first = NONE, last = NONE;
        std::size_t rows = 0;
    };

    template <class Body>
    void for_each_of(const Chain& chain, const Body& body) {
        u32 place = chain.first;
        for (std::size_t left = chain.rows; left > 0; --left) {
            const u32 after = at(place).after;
            if (!at(place).gone) body(place);
            place = after;
        }
    }
    void link(u32 place);
    void unlink(u32 place);
    void move(u32 place, bool waiting);
    void leave(u32 place);
    void forget(u32 place);

    LineShape shape_;
    std::size_t capacity_;
    std::size_t places_ = 0;
    std::size_t rows_ = 0, rows_beyond_ = 0, peak_ = 0;  // places in use, those that are gone included
    u64 evictions_ = 0;
    RowMap index_;                                       // places + 1
    std::vector<Chunk> chunks_;  // first those of places up to number `capacity_`, then those beyond
    std::array<u32, 2> free_{NONE, NONE};  // the first free place up to the capacity, and beyond it
    std::array<Chain, 2> chains_;          // of rows that may be needed, and of those that wait
    u32 turn_ = NONE;                      // where `take` goes on among the former
};

}  // namespace tierbed
