#include "owners.h"

#include <algorithm>

#include "workers/native/thread_pool.h"

namespace tierbed {
namespace {

// Owners take turns in their order, but for `last`.
u32 turn_of(u32 owner, const OwnerOrder& order) {
    return owner == order.last ? order.ranks - 1 : owner - (owner > order.last);
}

}  // namespace

void by_owner(const Batch& batch, const OwnerOrder& order) {
    constexpr std::size_t CHUNK = 4096;  // rows a task
    const std::size_t ranks = order.ranks, chunks = (batch.unique + CHUNK - 1) / CHUNK;
    std::vector<i64> ends(chunks * ranks, 0);  // of each chunk and turn: first how many rows, then their next place
    const auto for_rows = [&](std::size_t chunk, const auto& body) {
        i64* const of_turn = &ends[chunk * ranks];
        const std::size_t end = std::min(batch.unique, (chunk + 1) * CHUNK);
        for (std::size_t row = chunk * CHUNK; row < end; ++row) {
            const u32 turn = turn_of(owner_of(batch.hashes[row], order.ranks), order);
            body(row, turn, of_turn[turn]++);
        }
    };
    parallel_for(chunks, [&](std::size_t chunk) { for_rows(chunk, [](std::size_t, u32, i64) {}); });
    i64 total = 0;
    std::vector<i64> counts(ranks);
    for (std::size_t turn = 0; turn < ranks; ++turn) {
        const i64 begin = total;
        for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
            const i64 count = ends[chunk * ranks + turn];
            ends[chunk * ranks + turn] = total;
            total += count;
        }
        counts[turn] = total - begin;
    }
    for (u32 owner = 0; owner < order.ranks; ++owner) order.counts[owner] = counts[turn_of(owner, order)];
    parallel_for(chunks, [&](std::size_t chunk) {
        for_rows(chunk, [&](std::size_t row, u32, i64 place) {
            order.keys[place] = static_cast<i64>(batch.key(row));
            order.tables[place] = batch.tables[row];
            order.places[row] = place;
        });
    });
}

}  // namespace tierbed
