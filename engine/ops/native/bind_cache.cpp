// The binding of caches.
#include "bind.h"
#include "cached_tier.h"
#include "pool.h"

namespace tierbed {
namespace {

Replacement replacement_of(const std::string& name) {
    require(name == "lru" || name == "lfu", "policy: lru or lfu");
    return name == "lfu" ? LFU : LRU;
}

nb::dict metrics_of(CachedTier& tier) {
    const CacheCounts counts = tier.counts();
    const OverflowSize overflow = tier.overflow();
    const u64 row_bytes = stored_bytes_of(tier.shape().width);
    nb::dict all;
    all["hits"] = counts.hits;
    all["misses"] = counts.misses;
    all["insertions"] = counts.insertions;
    all["evictions_clean"] = counts.evictions_clean;
    all["evictions_dirty"] = counts.evictions_dirty;
    all["overflows"] = counts.overflows;
    all["bytes_in"] = counts.fetched * row_bytes;
    all["bytes_out"] = counts.written * row_bytes;
    all["capacity"] = tier.capacity();
    const std::size_t used = tier.used();
    all["resident_rows"] = used;
    all["fill"] = static_cast<double>(used) / static_cast<double>(tier.capacity());
    all["bytes"] = tier.bytes();
    all["overflow_rows"] = overflow.rows;
    all["overflow_peak_rows"] = overflow.peak;
    all["overflow_capacity"] = overflow.capacity;
    all["overflow_bytes"] = overflow.bytes;
    all["prefetch_waits"] = counts.prefetch_waits;
    add_latencies(all, "fetch", tier.fetch_times);
    add_latencies(all, "write", tier.write_times);
    return all;
}

}  // namespace

void bind_cache(nb::module_& m) {
    const nb::call_guard<nb::gil_scoped_release> unlocked;
    nb::class_<CachedTier, Tier>(m, "CachedTier")
        .def(
            "__init__",
            [](CachedTier* self, const Layout& layout, Tier& below, std::size_t budget_bytes,
               std::size_t overflow_bytes, const std::string& policy, std::size_t io_threads) {
                const CacheOptions options{budget_bytes, overflow_bytes, replacement_of(policy), io_threads};
                nb::gil_scoped_release unlocked;
                new (self) CachedTier(layout, below, options);
            },
            nb::arg("layout"), nb::arg("below"), nb::kw_only(), nb::arg("budget_bytes"), nb::arg("overflow_bytes"),
            nb::arg("policy"), nb::arg("io_threads"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("announce", &CachedTier::announce, unlocked)
        .def("prefetch", &CachedTier::prefetch, unlocked)
        .def("pin", &CachedTier::pin, unlocked)
        .def("unpin", &CachedTier::unpin, unlocked)
        .def("cancel", &CachedTier::cancel, unlocked)
        .def("peek", &CachedTier::peek, unlocked)
        .def("flush", &CachedTier::flush, unlocked)
        .def("close", &CachedTier::close, unlocked)
        .def("where",
             [](CachedTier& tier, u32 table, u64 key) -> nb::object {
                 const CachedTier::Place place = [&] {
                     nb::gil_scoped_release unlocked;
                     return tier.where(hash_row(table, key), table);
                 }();
                 if (!place.held) return nb::none();
                 nb::dict all = described(place.record);
                 all["slot"] = place.slot;
                 all["overflow"] = place.overflow;
                 all["pinned"] = place.pinned;
                 all["dirty"] = place.dirty;
                 return all;
             })
        .def("metrics", &metrics_of);
    m.def("use_own_pool", &use_own_pool, nb::arg("threads"));
}

}  // namespace tierbed
