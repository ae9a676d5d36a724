// The binding of what says which rank owns a row.
#include "ops/native/bind.h"
#include "owners.h"

namespace tierbed {
namespace {

void require_ranks(std::size_t ranks) {
    require(0 < ranks && ranks <= MOST_RANKS, "ranks must lie between 1 and 1024");
}

}  // namespace

void bind_owners(nb::module_& m) {
    m.def("owners", [](InVector<u32> tables, InVector<u64> keys, u32 ranks) {
        require(tables.size() == keys.size(), "tables and keys differ in length");
        require_ranks(ranks);
        std::vector<u16> owners(keys.size());
        for (std::size_t i = 0; i < owners.size(); ++i)
            owners[i] = static_cast<u16>(owner_of(hash_row(tables.data()[i], keys.data()[i]), ranks));
        return own(std::move(owners));
    });
    m.def("by_owner", [](const Batch& batch, u32 last, OutVector<i64> keys, OutVector<i64> tables,
                         OutVector<i64> places, OutVector<i64> counts) {
        require(keys.size() == batch.unique && tables.size() == batch.unique && places.size() == batch.unique,
                "keys, tables and places must be [unique]");
        require_ranks(counts.size());
        const u32 ranks = static_cast<u32>(counts.size());
        require(last < ranks, "last must be a rank");
        nb::gil_scoped_release unlocked;
        by_owner(batch, {ranks, last, keys.data(), tables.data(), places.data(), counts.data()});
    });
}

}  // namespace tierbed
